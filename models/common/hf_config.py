"""What the configurations of families share: reading, checking and writing dataclasses of config.json.

No field of config.json is dropped in silence: each is read, refused by name where it asks for what is not computed, or
listed as one that changes nothing (`Fields`). Those that no list knows are reported once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_GENERATION = dict.fromkeys(
    (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
        "typical_p", "use_cache", "bos_token_id", "eos_token_id",
    ),
    "says how to write text, not what the model computes",
)  # fmt: skip
_UNUSED: Mapping[str, str] = {
    **_GENERATION,
    **dict.fromkeys(("model_type", "architectures", "auto_map"), "the top level's model_type alone decides"),
    **dict.fromkeys(
        ("name_or_path", "_name_or_path", "_commit_hash", "transformers_version"), "says where a file is from"
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "parameters have the dtype of the file, or the one that is asked for"),
    **dict.fromkeys(
        (
            "output_hidden_states", "output_attentions", "return_dict", "tie_last_hidden_states",
            "allow_global_per_layer_attribute_access", "serialize_explicit_per_layer_config",
        ),
        "says what transformers hands out",
    ),
    **dict.fromkeys(
        ("attn_implementation", "experts_implementation", "chunk_size_feed_forward"),
        "says how transformers computes the same",
    ),
    **dict.fromkeys(
        (
            "is_decoder", "cross_attention_hidden_size", "decoder_start_token_id", "sep_token_id", "prefix",
            "finetuning_task", "task_specific_params", "tokenizer_class", "torchscript", "tf_legacy_loss",
            "use_bfloat16",
        ),
        "of other models, or older versions of transformers",
    ),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), "of classifiers"),
    "pad_token_id": "that of text_config counts",
    "initializer_range": "of fresh weights, which each family draws at its own scale",
}  # fmt: skip
_ONLY: Mapping[str, Any] = {
    "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "pruned_heads": {},
    "quantization_config": None, "compression_config": None, "per_layer_config": {},
    "rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fields:
    """What becomes of each field of one object of config.json.

    Attributes:
        where: the object's name.
        read: fields that the configuration is made of; values that it can't hold are refused there.
        only: fields of which only this value is computed (null stands for it, too); others are refused.
        unused: fields that change nothing of what is computed, whatever they say, and why.
        types: of the fields that are read as they are.
    """

    where: str
    read: frozenset[str]
    only: Mapping[str, Any]
    unused: Mapping[str, str]
    types: Mapping[str, str]

    @classmethod
    def of(
        cls,
        where: str,
        config: Any,
        *,
        also: Collection[str] = (),
        but: Collection[str] = (),
        only: Mapping[str, Any] | None = None,
        unused: Mapping[str, str] | None = None,
    ) -> Fields:
        """What is read are the fields of a dataclass but for `but`, and `also`; what any object may have is added."""
        types = {f.name: str(f.type) for f in dataclasses.fields(config) if f.name not in but}
        read = types.keys() | set(also)
        unused = {name: why for name, why in {**_UNUSED, **(unused or {})}.items() if name not in read}
        only = {name: value for name, value in {**_ONLY, **(only or {})}.items() if name not in read}
        return cls(where, frozenset(read), only, unused, types)

    def check(self, source: Mapping[str, Any]) -> None:
        """Reports fields in none of the lists.

        Raises:
            ValueError: a field of `only` has another value, or one that is read a value of another type.
        """
        for name, needed in self.only.items():
            if source.get(name) not in (needed, None):
                raise ValueError(
                    f"{self.where}.{name}={source[name]!r:.60} is not supported: only "
                    f"{'null' if needed is None else repr(needed)} is"
                )
        for name, kind in self.types.items():
            if name in source and not _fits(source[name], kind):
                raise ValueError(f"{self.where}.{name}={source[name]!r:.60} must be {_wanted(kind)}")
        report_unknown(self.where, source, {*self.read, *self.only, *self.unused})

    def others(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """What is not read: it is written back as it was."""
        return copy.deepcopy({name: value for name, value in source.items() if name not in self.read})


def _fits(value: Any, kind: str) -> bool:
    """Whether a value of a JSON file is of the type of a dataclass' field, by its name."""
    kind, optional = kind.removesuffix(" | None"), kind.endswith(" | None")
    if optional and value is None:
        return True
    if kind.startswith("tuple["):
        return isinstance(value, list | tuple) and all(_fits(x, kind[6:].removesuffix(", ...]")) for x in value)
    types: Any = {"int": int, "float": int | float, "bool": bool, "str": str}[kind]
    return isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))


def _wanted(kind: str) -> str:
    names = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
    kind = kind.removesuffix(" | None")
    return names.get(kind) or f"a list, each entry {_wanted(kind[6:].removesuffix(', ...]'))}"


def report_unknown(where: str, source: Mapping[str, Any], known: Collection[str]) -> None:
    """Warns of fields that nothing here knows."""
    if unknown := sorted(name for name, value in source.items() if name not in known and value is not None):
        report(f"{where} has fields that are not known here and change nothing: {', '.join(unknown)}")


@functools.cache
def report(text: str) -> None:
    """Warns once in a process."""
    warnings.warn(text, stacklevel=4)


def mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object below a key, empty if there is none; raises ValueError for anything else."""
    value = source.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.40}, not an object: copy or download the file again")
    return value


def read(cls: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass from those values that it knows; lists become tuples, to be hashable."""
    known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in known.items()})


def rename(source: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Moves values to the names of the fields; that of another name wins, as with transformers."""
    for other, name in aliases.items():
        if source.get(other) is not None:
            source[name] = source[other]


def by_kind(text: Mapping[str, Any], kinds: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What layers of each kind have of their own, from `per_layer_config`, which is by number of the layer.

    Args:
        text: text_config.
        kinds: of the layers.
        defaults: of the fields that may differ from kind to kind.

    Raises:
        ValueError: layers of a kind differ, or differ in other fields.
    """
    out: dict[str, dict[str, Any]] = {}
    own = {str(key).lstrip("0") or "0": value for key, value in mapping(text, "per_layer_config").items()}
    for layer, kind in enumerate(kinds):
        given = {**defaults, **mapping(own, str(layer))}
        other = {name: value for name, value in given.items() if name not in defaults and value != text.get(name)}
        if other:
            raise ValueError(
                f"text_config.per_layer_config says {other} of layer {layer}: only {' and '.join(defaults)} may differ "
                "between layers"
            )
        given = {name: given[name] for name in defaults}
        if given != out.setdefault(kind, given):
            raise ValueError(
                f"text_config.per_layer_config says {given} of layer {layer}, but {out[kind]} of earlier layers: it "
                f"must say the same of all layers of type {kind!r}"
            )
    if outside := sorted(own.keys() - set(map(str, range(len(kinds))))):
        raise ValueError(
            f"text_config.per_layer_config has an entry for layer {outside[0]}, but there are {len(kinds)} layers"
        )
    return out


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON would hold it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def positive(config: Any, where: str, zero: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless every integer of a dataclass is at least 1, or 0 where `zero` names it."""
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), int(field.name not in zero)
        if field.type == "int" and (not isinstance(value, int) or value < least):
            raise ValueError(f"{where}.{field.name}={value!r} must be an integer >= {least}")
