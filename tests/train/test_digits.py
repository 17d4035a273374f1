"""The digit documents: deterministic, disjoint, and answered by the images they name."""

import numpy as np
import pytest

from cpjax.mesh import make_mesh
from cpjax.shard import IGNORE, layout_from_name
from cpjax.train import digits, presets
from cpjax.train.config import DataConfig, ModelConfig
from cpjax.train.evaluate import accuracies, ask, count_right, draw_question

DATA = DataConfig()


def right_answer(kind, values):
    """Re-derived from the digits in the named images alone."""
    if kind == "sum":
        return [*values, *divmod(sum(values), 10)]
    return [*values, *sorted(values)] if kind == "sort" else list(values)


@pytest.mark.quick
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_the_digits_in_the_images(split):
    scans, labels, members = digits._scans()
    known = {scans[i].tobytes(): labels[i] for i in members["held_out"]}
    for document in digits.documents(DATA, 3, 5, 2, split):
        ids, targets = document.input_ids, document.labels
        assert len(ids) == len(targets) <= digits.length(DATA) and len(ids) > 1000
        assert len(document.images) == DATA.images >= 24
        if split == "held_out":  # to learn from, a document may show one image at a time
            assert {question.kind for question in document.questions} == {"read", "copy", "sum", "sort"}
        for question in document.questions:
            said = [int(digits.VOCABULARY[token]) for token in ids[question.answer]]
            values = said[: len(question.images)]
            assert said == right_answer(question.kind, values)
            if split == "held_out":  # not moved, so the scan itself tells
                assert values == [known[document.images[i].tobytes()] for i in question.images]
            np.testing.assert_array_equal(targets[question.answer], ids[question.answer])
        shown = np.flatnonzero(ids == digits.VOCABULARY.index("<image>"))
        captioned = (targets[shown[:-1] + 3] != IGNORE).mean()
        assert captioned == 0 if split == "held_out" else 0.3 < captioned < 0.7


def test_a_question_is_shown_with_its_answer_as_the_document_says_it():
    [document] = digits.documents(DATA, 0, 0, 1, "held_out")
    for question in document.questions:
        ids = document.input_ids
        shown = draw_question(document, question, ids[question.answer]).splitlines()[-1]
        values = [digits.VOCABULARY[token] for token in ids[question.answer]]
        if question.kind in ("sum", "sort"):
            values.insert(len(question.images), "=")
        assert shown == f"{question.text}: {' '.join(values)} (right)"
    wrong = draw_question(document, question, ids[question.answer] + 1).splitlines()[-1]
    assert wrong.endswith(f"(wrong, it is {' '.join(values)})")


def test_held_out_questions_are_about_images_far_back_not_asked_about_before():
    for document in digits.documents(DATA, 0, 0, 4, "held_out"):
        ids = document.input_ids
        images = np.flatnonzero(ids == digits.VOCABULARY.index("<image>"))
        for question in document.questions:
            assert question.answer[0] - images[list(question.images)].max() >= DATA.tokens // 8
            for image in question.images:
                name = ids[images[image] + 2]
                assert (ids[: question.answer[-1]] == name).sum() == 2  # where it is shown, and here
        assert len(document.questions) >= 16


def test_training_starts_with_sections_and_moves_on_to_whole_documents():
    def whole(step):
        documents = digits.documents(DATA, 0, step, 64, "train")
        shown = [np.flatnonzero(d.input_ids == digits.VOCABULARY.index("<image>")) for d in documents]
        return np.mean([at[-1] < 6 * DATA.images for at in shown])

    assert whole(0) < 0.35 and whole(200) > 0.6


def test_train_and_held_out_share_no_image():
    _, _, members = digits._scans()
    assert not set(members["train"]) & set(members["held_out"])
    assert len(members["train"]) + len(members["held_out"]) == 1797 and len(members["held_out"]) > DATA.images


def test_a_document_depends_on_its_own_arguments_alone():
    several = digits.documents(DATA, 1, 7, 3, "train")
    for again, document in zip(digits.documents(DATA, 1, 7, 2, "train"), several[:2], strict=True):
        np.testing.assert_array_equal(again.input_ids, document.input_ids)
        np.testing.assert_array_equal(again.images, document.images)
    texts = {
        d.text() for seed, step in ((1, 7), (1, 8), (2, 7)) for d in digits.documents(DATA, seed, step, 3, "train")
    }
    assert len(texts) == 9


@pytest.mark.parametrize("data", [DataConfig(images=2), DataConfig(images=65), DataConfig(images=64, tokens=500)])
def test_documents_that_cannot_be_written_are_refused(data):
    with pytest.raises(ValueError, match=r"--data\.\w+ is \d+"):
        digits.documents(data, 0, 0, 1, "train")


@pytest.mark.parametrize(("layout", "dp"), [("zigzag", 1), ("packed", 1), ("packed", 2)])
def test_answers_are_looked_up_where_the_layout_put_the_documents(layout, dp):
    """What predicts the token that does come next is right in every answer; all batches have the same shapes."""
    data, shapes = DataConfig(images=8, tokens=205), set()

    def next_token(batch, sharder):
        shapes.add((batch["input_ids"].shape, sharder.padded_length))
        return np.roll(batch["input_ids"], -1, axis=1)

    config, mesh = presets.model_config(ModelConfig()), make_mesh(dp=dp, cp=4)
    for step in range(3):
        documents = digits.documents(data, 0, step, 2, "held_out")
        answers = ask(next_token, config, data, documents, layout_from_name(layout, 4), mesh)
        assert accuracies(count_right(documents, answers))["held_out_accuracy"] == 1
    assert shapes == {((1, 416), 416) if layout == "packed" and dp == 1 else ((2, 208), 208)}
