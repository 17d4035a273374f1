"""Training on one's own records: which batches come, held-out losses, and answers that the model writes."""

import base64
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cpjax.mesh import make_mesh
from cpjax.models import family, from_pretrained, save_pretrained
from cpjax.models.common.checkpoint import COMPANIONS, read_json
from cpjax.shard import IGNORE, Packed, layout_from_name
from cpjax.train import records_task
from cpjax.train.config import Config, MeshConfig, ModelConfig, RunConfig, parse_config
from cpjax.train.data import RecordError, RecordsConfig
from cpjax.train.evaluate import read_data_config
from cpjax.train.records_task import RecordsTask, by_set
from cpjax.train.step import split_model
from cpjax.train.task import open_task
from tests.data.common import chat, make_folder, png, random_chats, write_jsonl

TOKENS, PATCHES = 192, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder `base`, and records."""
    path = tmp_path_factory.mktemp("records")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    files = make_folder(path / "files", **layers)
    source = read_json(files / "config.json")
    module = family(source["model_type"])
    config, rng = module.Config.from_dict(source), np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: module.Model(config, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 8, leaf.dtype), state)
    save_pretrained(nnx.merge(graph, state), path / "base", companions=files)
    write_jsonl(path / "train.jsonl", random_chats(40))
    write_jsonl(path / "one.jsonl", random_chats(3, seed=1))
    write_jsonl(path / "two.jsonl", random_chats(2, seed=2))
    return path


def options(folder, cp=2, dp=1, layout="zigzag", **records):
    records = {"files": [str(folder / "train.jsonl")], "tokens": TOKENS, "patches": PATCHES, "shapes": 2} | records
    return Config(
        model=ModelConfig(path=str(folder / "base")),
        records=RecordsConfig(**records),
        mesh=MeshConfig(cp=cp, dp=dp, layout=layout),
        run=RunConfig(batch_size=4),
    )


def make_task(config):
    task = open_task(config, layout_from_name(config.mesh.layout, config.mesh.cp))
    assert isinstance(task, RecordsTask)
    return task


def tokens_of(batch, sharder):
    """The tokens of a batch without its pads, document by document, whatever the layout."""
    ids, documents = (np.asarray(batch[name]) for name in ("input_ids", "document_ids"))
    return [
        row[own == number].tolist()
        for row, own in zip(ids, documents, strict=True)
        for number in range(1, own.max() + 1)
    ]


@pytest.mark.parametrize("layout", ["zigzag", "packed"])
def test_r62_a_run_resumes_with_the_batches_that_come_next_on_any_mesh(folder, layout):
    """Of the whole stream, none is skipped and none comes twice, over the end of an epoch too."""
    whole = make_task(options(folder, layout=layout))
    batches = [tokens_of(*whole.next_batch()) for _ in range(8)]
    assert len({json.dumps(batch) for batch in batches}) == 8
    begun = make_task(options(folder, layout=layout))
    for _ in range(5):
        begun.next_batch()
    state = json.loads(json.dumps(begun.state()))
    for cp in (1, 2, 4, 8):
        task = make_task(options(folder, cp, layout=layout))
        task.next_batch()  # read to see its shapes
        task.restore(state)
        assert [tokens_of(*task.next_batch()) for _ in range(3)] == batches[5:]
    with pytest.raises(ValueError, match="the data differ from those of the checkpoint"):
        make_task(options(folder, layout=layout, tokens=TOKENS + 32)).restore(state)


def test_a_picture_cut_short_is_passed_over_on_resume(folder, tmp_path):
    """It is opened, but not decoded, before the first step; what else comes when does not change, nor do its shapes."""
    chats = random_chats(40)
    uri = base64.b64encode(png(16, 24)[: 2 * len(png(16, 24)) // 3]).decode()
    chats.insert(9, chat("<image>?", "lost", images=[f"data:image/png;base64,{uri}"]))
    file = str(write_jsonl(tmp_path / "cut.jsonl", chats))
    begun, taken = make_task(options(folder, files=[file])), 0
    with pytest.raises(RecordError, match=r"cut\.jsonl:10 ") as error:
        while taken < 30:
            state = json.loads(json.dumps(begun.state()))
            begun.next_batch()
            taken += 1
    assert error.value.reason == "unreadable image"
    other = make_task(options(folder, files=[file], broken="skip", shapes=1))
    other.restore(state)
    whole = make_task(options(folder, files=[file], broken="skip"))
    batches = [tokens_of(*whole.next_batch()) for _ in range(taken + 2)]
    assert [tokens_of(*other.next_batch()) for _ in range(2)] == batches[taken:]
    assert other.left_out() == "1 unreadable image"
    with pytest.raises(RecordError):
        begun.restore(state)
        begun.next_batch()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped", "packed"])
def test_batches_have_the_shapes_that_were_said(folder, layout):
    task = make_task(options(folder, 4, layout=layout))
    said = task.describe()[1]
    assert "40 records" in said and "2 shapes at most" in said and "compiled once for each shape" in said
    shapes = {}
    for _ in range(6):
        batch, sharder = task.next_batch()
        shapes[jax.tree.structure(sharder), *(array.shape for array in batch.values())] = batch["input_ids"].shape
        assert isinstance(sharder.layout, Packed) == (layout == "packed")
        assert batch["input_ids"].shape[1] == sharder.padded_length and (batch["labels"] != IGNORE).any()
    assert len(shapes) <= 2
    assert max(np.prod(shape) for shape in shapes.values()) == 4 * TOKENS


def held_out(folder, **more):
    return {"held_out": [f"first={folder / 'one.jsonl'}", str(folder / "two.jsonl")], "answers": 2} | more


def test_held_out_losses_and_answers(folder, monkeypatch):
    """Sums of the losses of tokens over the number of tokens: one by one, and over two sets; the same on two meshes."""
    asked = []

    def write(model, prompts, count, *, stop_tokens, **options):
        """Right answers, but for the last question: what generation itself does is tested elsewhere."""
        asked.append((prompts, count, stop_tokens))
        questions = [question for questions in task._questions.values() for question in questions]
        encode = task._encoder.tokenizer.encode
        return [encode(question.answer).ids + stop_tokens for question in questions[:-1]] + [[*stop_tokens]]

    monkeypatch.setattr(records_task, "generate", write)
    found = []
    graphdef, params, frozen = split_model(from_pretrained(folder / "base"))
    for cp, dp, layout in ((1, 1, "zigzag"), (2, 2, "packed")):
        task = make_task(options(folder, cp, dp, layout=layout, **held_out(folder, max_new_tokens=5)))
        forward = {"transport": "ring", "dtype": jnp.dtype("float32"), "remat": "none"}
        found.append(task.make_evaluation(graphdef, make_mesh(dp=dp, cp=cp), **forward)(params, frozen))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    loss, names = found[0], ["", "/first", "/two"]
    assert sorted(loss) == sorted(f"held_out_{kind}{name}" for kind in ("loss", "exact") for name in names)
    assert sorted(loss) == sorted(task.measures())
    assert [loss[f"held_out_exact{name}"] for name in names] == [0.75, 1, 0.5]

    # Oracle: each record by itself, and numpy's log-sum-exp.
    sums = {}
    graph, state = nnx.split(from_pretrained(folder / "base"))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward(batch, sharder):
        model = nnx.merge(graph, state)
        return model.logits(model(batch, sharder))

    for name, dataset in task._held_out.items():
        sums[name] = np.zeros(2)
        for index in range(len(dataset.records)):
            row, _ = dataset.row([index])
            batch, sharder = records_task.host_batch(
                task.model_config, [row], layout_from_name("zigzag", 1), TOKENS, PATCHES
            )
            logits = np.asarray(forward(batch, sharder), np.float64)[0]
            targets = batch["labels"][0]
            counted = np.flatnonzero(targets != IGNORE)
            losses = np.log(np.exp(logits[counted]).sum(-1)) - logits[counted, targets[counted]]
            sums[name] += losses.sum(), len(counted)
    assert {k: v for k, v in loss.items() if "loss" in k} == pytest.approx(by_set("held_out_loss", sums), rel=1e-5)

    prompts, count, stops = asked[0]
    assert count == 5 and [task._encoder.tokenizer.id_to_token(stop) for stop in stops] == ["<|im_end|>"]
    shown = task._encoder.tokenizer.decode(prompts[0].input_ids.tolist(), skip_special_tokens=False)
    assert shown.endswith("<|im_start|>assistant\n<think>\n")


def test_the_last_answer_is_asked(folder, tmp_path):
    records = [chat("why?", "so", "<image> or?", "the first\nor none", images=["a.png"]), chat("hi", "yes", "and")]
    (tmp_path / "a.png").write_bytes(png(16, 24))
    file = write_jsonl(tmp_path / "asked.jsonl", records)
    task = make_task(options(folder, held_out=[str(file)], answers=9))
    first, second = task._questions["asked"]
    assert (first.answer, second.answer) == ("\n</think>\n\nthe first\nor none", "\n</think>\n\nyes")
    assert len(first.prompt.media) == 1 and first.prompt.labels is None
    assert "2 of them are asked" in task.describe()[2]


def test_names_that_are_not_used_are_told_before_the_run(folder, tmp_path):
    records = [chat("hi", "yes"), chat("hi", "yes", id=1), chat("what?", "no", id=2)]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    said = make_task(options(folder, files=[str(file)], held_out=[str(file)])).describe()
    assert said.count(f"note: id is not used: 2 records, first {file}:2") == 2  # of the records, and of those held out


def test_broken_records_are_named_and_counted(folder, tmp_path):
    file = write_jsonl(tmp_path / "bad.jsonl", [chat("hi", "yes"), chat("hi"), chat("hi", "word " * 300)])
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 has no assistant turn"):
        make_task(options(folder, files=[str(file)]))
    task = make_task(options(folder, files=[str(file)], broken="skip"))
    said = "\n".join(task.describe())
    assert f"left out: {file}:2 has no assistant turn" in said and f"left out: {file}:3 has " in said
    assert task.left_out() == "1 no assistant turn, 1 too long"
    task = make_task(options(folder, broken="skip", held_out=[f"mine={file}"]))
    assert task.describe()[2].endswith("0 of them are asked. Left out: 1 no assistant turn, 1 too long.")
    assert task.left_out() == "of held-out mine: 1 no assistant turn, 1 too long"


def test_the_card_says_what_it_was_trained_on(folder, tmp_path):
    task = make_task(options(folder, **held_out(folder)))
    task.write_card(tmp_path, {"step": 3, "loss": 1.0, "held_out_loss": 0.5, "held_out_loss/two": 0.25}, "SomeModel")
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\n") and "train.jsonl" in card and "- held-out loss, two: 0.2500" in card
    assert "- loss" not in card
    with pytest.raises(ValueError, match=r"was trained on records of its own, .* --records.held_out and --records.ans"):
        read_data_config(tmp_path / "README.md")


def test_companions_are_copied_and_an_export_is_replaced(folder, tmp_path):

    model = from_pretrained(folder / "base")
    for _ in range(2):
        save_pretrained(model, tmp_path / "export", companions=folder / "base")
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert names == {file.name for file in (folder / "base").iterdir()} and len(names & set(COMPANIONS)) == 5
    for name in names & set(COMPANIONS):
        assert (tmp_path / "export" / name).read_bytes() == (folder / "base" / name).read_bytes()


def test_options_of_records():
    given = ["--records.files", "a.jsonl,b.parquet", "--records.held_out=x=c.jsonl,d.json", "--model.path", "m"]
    config = parse_config(given)
    assert config.records.files == ["a.jsonl", "b.parquet"]
    assert config.records.held_out_sets == {"x": "c.jsonl", "d": "d.json"}
    assert parse_config(["--model.path", "m", "--records.files", "[a.jsonl]"]).records.files == ["a.jsonl"]
    assert dataclasses.replace(config, records=RecordsConfig()).records.files == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--records.files", "a.jsonl"], "records need --model.path"),
        (["--records.held_out", "a.jsonl"], "give the records to train on too"),
        (["--records.files", "a.jsonl", "--records.answers", "3"], "--records.answers is 3: give --records.held_out"),
        (["--records.files", "a.jsonl", "--records.held_out", "a/x.json,b/x.json"], "give files of one name different"),
        (["--records.tokens", "0"], "--records.tokens is 0"),
    ],
)
def test_bad_options_of_records(arguments, words):
    with pytest.raises(ValueError, match=r".") as error:
        parse_config(arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
