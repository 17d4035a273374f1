"""The options of a run: dataclasses, filled from their defaults, a YAML file and dotted command-line options."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings
from jsonargparse.typing import register_type

from cpjax.train.data.options import RecordsConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Model"""

    path: str = ""
    """Folder of a Hugging Face checkpoint to start from; empty: from scratch, with the family and the sizes below."""
    family: Literal["qwen3_5", "qwen3_5_moe", "gemma4", "step3p7"] = "qwen3_5"
    """Family of a model from scratch: Qwen3.5, that with experts, Gemma 4, or Step 3.7."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the parameters and of what the optimizer keeps of them; decay rates, gated norms, biases of
    routers and statistics are no narrower than in --model.path."""
    compute_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Number format of activations and matrix products, same: as dtype; sums and the loss are float32. The usual mixed
    precision is bfloat16 here and float32 parameters; float16 scales the loss so that small gradients survive."""
    remat: Literal["none", "layer", "dots"] = "layer"
    """What the backward pass computes again instead of keeping it: nothing, all inside the layers, or all there but the
    products with weight matrices; the numbers stay the same."""
    hidden_size: int = 64
    """Width of a token, in numbers."""
    layers: int = 4
    """Layers of the language model; every fourth is full attention and the others linear attention (Qwen3.5), or every
    second, and the others see a sliding window."""
    heads: int = 4
    """Query heads of a full-attention layer."""
    kv_heads: int = 2
    """Key/value heads of a full-attention layer."""
    head_dim: int = 32
    """Width of a head of a full-attention layer, in numbers."""
    linear_heads: int = 1
    """Heads of a linear-attention layer; for Qwen3.5."""
    linear_head_dim: int = 128
    """Width of a head of a linear-attention layer, in numbers; it remembers about as many things. For Qwen3.5."""
    vision_hidden_size: int = 48
    """Width of an image patch in the vision tower, in numbers."""
    vision_layers: int = 1
    """Layers of the vision tower."""
    vision_heads: int = 2
    """Attention heads of the vision tower."""

    @property
    def compute(self) -> str:
        """Number format of activations and matrix products."""
        return self.dtype if self.compute_dtype == "same" else self.compute_dtype

    def sizes_given(self) -> list[str]:
        """The options meant for a model from scratch, its family and sizes, that differ from their defaults."""
        sizes = [field for field in dataclasses.fields(self) if field.name == "family" or field.type == "int"]
        return [f"--model.{size.name}" for size in sizes if getattr(self, size.name) != size.default]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data of the default job; ignored where --records.files names records"""

    images: int = 64
    """Digit images per document."""
    tokens: int = 1020
    """Length of a document, in tokens: images come first, questions fill the rest."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Mesh: one device does 1/(dp x fsdp) of the rows, 1/cp of every sequence and 1/tp of every layer"""

    dp: int = 1
    """Copies of the parameters, in devices; each gets its own rows of the batch."""
    fsdp: int = 1
    """Parts that parameters and optimizer state are split into, in devices; each gets its own rows of the batch."""
    cp: int = 4
    """Parts that every sequence is split into, in devices."""
    tp: int = 1
    """Parts that the heads and hidden features of every layer are split into, in devices; it must divide their numbers.
    It sends the most of all: for devices that share a fast link, and models whose layers do not fit otherwise."""
    ep: int = 1
    """Parts that the experts of every layer are split into, over the devices of cp, which it must divide: a device
    gathers 1/ep of them, and tokens travel instead. It takes no devices of its own."""
    layout: Literal["zigzag", "contiguous", "striped", "packed"] = "zigzag"
    """Which tokens a device owns: zigzag balances causal attention over a row; packed over every document by itself,
    and makes one row of all that a device computes at a time; striped deals tokens out in turn; contiguous is one run.
    Under packed and striped, tokens change places before and after linear attention."""
    transport: Literal["ring", "allgather", "ulysses", "ring_ulysses", "auto"] = "ring"
    """How keys and values reach the other devices: passed round a ring, gathered at once, exchanged for heads (which cp
    must divide), or both; auto takes the least expensive one."""
    kernel: Literal["auto", "xla", "pallas"] = "auto"
    """What computes attention: auto takes the Pallas kernels on GPUs, and plain XLA elsewhere."""

    @property
    def words(self) -> str:
        """The sizes of its axes, and the parts of the experts."""
        experts = f", experts in {self.ep} parts" if self.ep > 1 else ""
        return f"dp {self.dp} x fsdp {self.fsdp} x cp {self.cp} x tp {self.tp}{experts}"


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or decay of their own"""

    pattern: str
    """Regular expression, searched as those of freeze are."""
    lr_scale: float = 1.0
    """Their learning rate, as a multiple of the others'."""
    weight_decay: float | None = None
    """Their decay, vectors included; none given: as for the others."""


FRESH_GROUPS = {"step3p7": (ParameterGroup("o_proj|down_proj", weight_decay=20.0),)}
"""By family, groups that a small model from scratch has beside those given, which count first.

Step 3.7 has no norm behind its layers. Adam lets what they write grow to several times the embeddings, so that a layer
no longer sees which name a token is, and nothing is looked up by name (held-out accuracy 0.05); decay of the matrices
that write keeps it near them."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer"""

    name: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    """Muon updates the projections inside layers, with Adam for everything else; all decay weights as AdamW does."""
    lr: float = 4e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warmup: falls to its end along half a cosine or a line, stays, or stays and falls along a
    line over the last steps."""
    warmup: int = 100
    """Steps over which the learning rate grows from 0 to its peak."""
    decay: float = 0.2
    """Share of the run's steps over which the wsd schedule falls."""
    final: float = 0.0
    """Learning rate at the end, as a share of its peak; not for the constant schedule."""
    weight_decay: float = 0.01
    """Decay of weight matrices per step, times the learning rate; vectors are not decayed."""
    clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it, 0 turns this off."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's first and second moment per step."""
    momentum: float = 0.95
    """Decay of the momentum of muon and sgd per step; 0 turns it off for sgd."""
    ema: float = 0.0
    """Decay, per step, of a moving average of the parameters, for instance 0.999, which evaluation and export then use
    in their stead; 0 keeps none."""
    ahead: float = 0.1
    """Weight of the mean loss of the heads that predict tokens further ahead, where a model has some; 0 leaves them as
    they are."""
    balance: float | None = None
    """Weight of the routers' balance loss, where a model has one; none given: as the model's config.json says."""
    groups: list[ParameterGroup] = dataclasses.field(default_factory=list)
    """Parameters with a rate or decay of their own, for instance [{pattern: visual, lr_scale: 0.1}]; of several groups
    that match, the first counts. Each has a pattern, searched as those of freeze are, lr_scale and weight_decay. A
    small model from scratch adds, behind yours, what its family needs to learn the digits (Step 3.7: strong decay of
    the matrices that write to the hidden states)."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """Regular expressions of parameters to leave as they are, for instance [visual]; they are searched in the
    dotted path and in the Hugging Face name of each parameter."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA: trains low-rank adapters in PEFT's format and leaves the parameters of --model.path as they are"""

    rank: int = 0
    """Rank of the adapters; 0 trains the parameters themselves."""
    alpha: float = 16.0
    """What adapters add is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which suits high ranks."""
    dora: bool = False
    """Also train the length of each column of an adapted matrix, apart from its direction."""
    dropout: float = 0.0
    """Share of the numbers that enter an adapter which are dropped while training, others each time."""
    targets: list[str] = dataclasses.field(default_factory=lambda: ["language_model.*_proj"])
    """Regular expressions of the projections to adapt, searched as those of freeze are; default: all in the layers of
    the language model."""
    modules_to_save: list[str] = dataclasses.field(default_factory=list)
    """Regular expressions of parameters, searched as those of freeze are: the modules that hold them are trained whole
    and saved with the adapter, for instance [embed_tokens, lm_head]."""
    path: str = ""
    """Folder of a PEFT adapter to start from; it must have the rank and kind above. Empty: a fresh one."""
    merge: bool = False
    """Also export the model with the adapters merged into it."""


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Distillation: the model also learns to predict what a teacher predicts"""

    teacher: str = ""
    """Folder of a Hugging Face checkpoint of the same family and tokenizer, of any size; empty: no teacher."""
    ratio: float = 0.5
    """Share r of the teacher in the loss, (1 - r) x cross-entropy + r x T^2 x KL(teacher || model)."""
    temperature: float = 2.0
    """T, which the logits of both are divided by for KL; above 1, unlikely tokens count for more."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Run"""

    out: str = "runs/digits"
    """Folder for metrics, picture, checkpoints and export; made if missing, never overwritten."""
    resume: bool = False
    """Continue the run in the output folder; the mesh may differ, what decides the numbers may not."""
    steps: int = 700
    """Length of the run, in optimizer steps."""
    batch_size: int = 2
    """Rows per step, over all devices: documents, or records packed together."""
    accumulate: int = 1
    """Parts that the batch of a step is computed in, one after another, which takes less memory; the result is that of
    the whole batch."""
    max_nonfinite: int = 20
    """Steps in a row whose loss or gradient may be infinite or no number; each is skipped, and then the run stops."""
    seed: int = 0
    """Seed of initial weights, of the documents, and of the order and packing of records."""
    eval_every: int = 100
    """Steps between evaluations on held-out documents or records; the last step is always evaluated."""
    eval_batches: int = 8
    """Batches of held-out documents per evaluation of the default job."""
    save_every: int = 100
    """Steps between checkpoints; the last step, SIGTERM and Ctrl-C always save one."""
    keep: int = 2
    """Checkpoints to keep; older ones are deleted once a newer one is complete."""
    keep_best: str = ""
    """Held-out metric, for instance held_out_accuracy: the checkpoint in which it is best (a loss: least) is kept too,
    and one is also saved whenever it is better than before, and it is what is exported at the end; empty: none is."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the folder tensorboard of the output folder."""
    wandb: str = ""
    """Project in wandb that also gets the metrics; empty: none."""
    profile: str = ""
    """Steps that jax.profiler traces into the folder profile of the output folder: N, that many after the first one,
    which compiles, or FIRST:LAST; empty: none."""

    def profiled(self, taken: int) -> range:
        """The steps to trace in a run that has taken some.

        Raises:
            ValueError: it is not written so, or lies outside of the run.
        """
        if not self.profile:
            return range(0)
        first, _, last = self.profile.rpartition(":")
        if not (last.isdigit() and (first or "1").isdigit()):
            raise ValueError(f"--run.profile is {self.profile}: it must be a number of steps, or FIRST:LAST")
        steps = range(int(first), int(last) + 1) if first else range(taken + 2, taken + 2 + int(last))
        if not steps or steps[0] < 1 or (first and steps[-1] > self.steps):
            raise ValueError(
                f"--run.profile is {self.profile}: it must be at least one of the steps 1 to {self.steps} of the run"
            )
        return steps


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Plan: what --plan compiles for"""

    gpu: Literal["h100", "h200"] = "h200"
    """Kind of the GPUs."""
    hosts: int = 1
    """Machines that hold them, each as many."""


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run.

    Raises:
        ValueError: a value outside its range.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    records: RecordsConfig = dataclasses.field(default_factory=RecordsConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        if not self.model.path:
            groups = dict.fromkeys([*self.optimizer.groups, *FRESH_GROUPS.get(self.model.family, ())])
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, groups=list(groups)))
        for name in ("mesh.dp", "mesh.fsdp", "mesh.cp", "mesh.tp", "mesh.ep", "run.steps", "run.batch_size",
                     "run.accumulate", "run.max_nonfinite", "run.eval_every", "run.eval_batches", "run.save_every",
                     "run.keep", "plan.hosts"):  # fmt: skip
            self._check(name, self._get(name) >= 1, "at least 1")
        for name in ("optimizer.warmup", "optimizer.weight_decay", "optimizer.clip", "optimizer.ahead", "lora.rank"):
            self._check(name, self._get(name) >= 0, "0 or more")
        self._check("run.seed", 0 <= self.run.seed < 2**32, "0 or more, and below 2**32")
        self._check("optimizer.balance", (self.optimizer.balance or 0) >= 0, "0 or more")
        for name in ("optimizer.lr", "lora.alpha", "distill.temperature"):
            self._check(name, self._get(name) > 0, "above 0")
        for name in ("optimizer.momentum", "optimizer.ema", "lora.dropout"):
            self._check(name, 0 <= self._get(name) < 1, "in [0, 1)")
        for name in ("optimizer.decay", "optimizer.final", "distill.ratio"):
            self._check(name, 0 <= self._get(name) <= 1, "in [0, 1]")
        self._check("optimizer.betas", all(0 <= beta < 1 for beta in self.optimizer.betas), "two numbers in [0, 1)")
        self._check("mesh.ep", self.mesh.cp % self.mesh.ep == 0, f"a divisor of mesh.cp, which is {self.mesh.cp}")
        self._check(
            "run.batch_size",
            self.run.batch_size % self.parts == 0,
            f"a multiple of mesh.dp x mesh.fsdp x run.accumulate, which is {self.parts}",
        )
        self.run.profiled(0)
        if self.records.files and not self.model.path:
            raise ValueError(
                f"--records.files is {self.records.files}: records need --model.path, a model with its tokenizer"
            )
        if self.lora.rank and not self.model.path:
            raise ValueError(f"--lora.rank is {self.lora.rank}: adapters need --model.path, the model that they adapt")
        if self.lora.path and not self.lora.rank:
            raise ValueError(f"--lora.path is {self.lora.path}: give --lora.rank too, the rank of that adapter")
        if self.lora.merge and not self.lora.rank:
            raise ValueError("--lora.merge is given without --lora.rank: there are no adapters to merge")

    @property
    def parts(self) -> int:
        """In how many parts the rows of a step are computed, on other devices or one after another."""
        return self.mesh.dp * self.mesh.fsdp * self.run.accumulate

    def _get(self, name: str) -> Any:
        section, field = name.split(".")
        return getattr(getattr(self, section), field)

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"--{name} is {self._get(name)}: it must be {wanted}")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by section and name, as in a YAML file."""
        return yaml.safe_load(self.to_yaml())

    def to_yaml(self) -> str:
        """The file that `--config` reads back."""
        sections = dataclasses.asdict(self)
        sections["optimizer"]["betas"] = list(self.optimizer.betas)
        return yaml.safe_dump(sections, sort_keys=False)


COMMANDS = ("train", "check", "plan")
"""What can be done with a run: train it, or with --check or --plan look at it beforehand."""

DESCRIPTION = """Trains a vision-language model with every sequence split over several devices.

Without options: a small Qwen3.5-VL learns from scratch to read long documents of handwritten digits, on four GPUs or,
where there are fewer, on four virtual CPU devices. It writes metrics, a picture, checkpoints and a Hugging Face
export to runs/digits. An option on the command line beats the YAML file, which beats the default.

With --check nothing is trained: a small model of the same kind takes one step on the mesh of the other options and one
on a single device, and loss and gradients are compared. With --plan nothing is computed either: the step is compiled
for GPUs, of which none need be here, to say what memory, traffic and time it takes at least."""


def make_parser() -> ArgumentParser:
    """The command line: one option per field, its help the text below the field.

    Every option holds numbers, texts, or lists of them or of `ParameterGroup`, which `_group` reads; none holds a class
    or a function, and a section is no option of its own. So there is nothing for which the parser would import what a
    value names, such as a `class_path`.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    register_type(ParameterGroup, dataclasses.asdict, _group)
    parser = ArgumentParser(
        prog="python -m cpjax.train",
        usage="python -m cpjax.train [--config FILE] [--section.option VALUE ...]",
        description=DESCRIPTION,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", metavar="FILE", help="YAML file of options, in sections as below.")
    for field in dataclasses.fields(Config):
        section: Any = field.default_factory
        group = parser.add_argument_group((section.__doc__ or "").strip().split("\n")[0])
        group.add_class_arguments(section, field.name, as_group=False)
    for action in parser._actions:
        if "." in action.dest and not action.choices:
            action.metavar = "VALUE"
    return parser


def _group(given: Any) -> ParameterGroup:
    """The group that a mapping describes, in which null stands for the default; raises ValueError."""
    if isinstance(given, ParameterGroup):
        return given
    names = [field.name for field in dataclasses.fields(ParameterGroup)]
    keys = [str(key) for key in given] if isinstance(given, Mapping) else [repr(given)]
    if "pattern" not in keys or not set(keys) <= set(names):
        raise ValueError(f"a group has a pattern, and perhaps {' and '.join(names[1:])}, not {', '.join(keys)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ParameterGroup, as_group=False)
    try:
        return ParameterGroup(**vars(parser.parse_object({key: given[key] for key in given if given[key] is not None})))
    except Exception as error:  # as in `parse_config`
        raise ValueError(_sentence(str(error), parser)) from None


def parse_command(arguments: Sequence[str]) -> tuple[str, Config]:
    """What to do, one of `COMMANDS`, and the options.

    Raises:
        ValueError: as `parse_config`, or --check and --plan together.
    """
    given = [command for command in COMMANDS[1:] if f"--{command}" in arguments]
    if len(given) > 1:
        raise ValueError("--check and --plan are given: give one of them at a time")
    rest = [argument for argument in arguments if argument not in [f"--{command}" for command in given]]
    return (given or ["train"])[0], parse_config(rest)


def parse_config(arguments: Sequence[str]) -> Config:
    """The options of a command line.

    Raises:
        ValueError: in one sentence, an unknown option, a bad value or an unreadable file.
        SystemExit: `--help` was asked for.
    """
    parser = make_parser()
    arguments = _files_first(arguments)
    for option, value in zip(arguments, [*arguments[1:], ""], strict=False):
        if option == "--config" or option.startswith("--config="):
            _check_file(pathlib.Path(option.partition("=")[2] or value), parser)
    try:
        parsed = parser.parse_args(_lists(arguments))
    except Exception as error:  # jsonargparse raises several kinds; all mean bad input here
        raise ValueError(_sentence(str(error), parser)) from None
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        if not hasattr(parsed[field.name], "__dict__"):
            raise ValueError(
                f"section {field.name} is {parsed[field.name]!r}: it must hold options by name, as --help lists them"
            )
        values, options = vars(parsed[field.name]), field.default_factory
        if unknown := values.keys() - {option.name for option in dataclasses.fields(options)}:  # type: ignore
            raise ValueError(f"unknown option --{field.name}.{min(unknown)}: --help lists all options")
        if empty := [name for name, value in values.items() if value is None and getattr(options, name, 0) is not None]:
            raise ValueError(f"--{field.name}.{empty[0]} has no value: give one, or drop it to have the default")
        sections[field.name] = options(**values)  # type: ignore
    return Config(**sections)


def _check_file(file: pathlib.Path, parser: ArgumentParser) -> None:
    """Says in which file, and where in it, an option is wrong, which jsonargparse does not."""
    if not file.is_file():
        return
    try:
        found = yaml.safe_load(file.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"Unexpected config, {found!r:.40}: it must hold options by section")
        parser.parse_object(found)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"{file}:{line}: {error.problem}: mend the YAML there") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text file ({error.reason}): give a YAML file") from None
    except Exception as error:  # as below
        raise ValueError(f"{file}: {_sentence(str(error), parser)}") from None


def _files_first(arguments: Sequence[str]) -> list[str]:
    """Moves `--config file` to the front, so that the command line wins wherever it stands."""
    files: list[str] = []
    rest = list(arguments)
    while found := [i for i, argument in enumerate(rest) if argument == "--config" or argument.startswith("--config=")]:
        end = found[0] + (2 if rest[found[0]] == "--config" else 1)
        files += rest[found[0] : end]
        del rest[found[0] : end]
    return files + rest


def _lists(arguments: Sequence[str]) -> list[str]:
    """Writes a.jsonl,b.parquet, the files of an option, as the list that it is."""
    out: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if (option if equals else "".join(out[-1:])) in ("--records.files", "--records.held_out"):
            listed = value if value.startswith("[") else json.dumps(value.split(","))
            argument = option + equals + listed
        out.append(argument)
    return out


def _sentence(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message as one sentence in the words of the command line."""
    message = " ".join(message.split())
    options = [option for action in parser._actions for option in action.option_strings]
    if unknown := re.match(r"unrecognized arguments: (\S+)|Option '(\S+)' is not accepted", message):
        name = unknown[1].split("=")[0] if unknown[1] else f"--{unknown[2]}"
        close = difflib.get_close_matches(name, options, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all options"
        return f"unknown option {name}: {hint}"
    message = re.sub(r"Parser key \"(\S+)\":", r"bad value for --\1:", message)
    message = re.sub(r"Does not validate .*?(Expected an? <class '\w+'>).*Given value:", r"\1. Got value:", message)
    message = re.sub(r"Expected an? (?:<class '(\w+)'>|(\S.*?))\. Got value: ?", _expected, message)
    message = re.sub(r"(--optimizer.groups: )Not of type ParameterGroup: (bad value for --)?", r"\1", message)
    message = re.sub(r", not pattern:(\S+?)(, .*)?$", r": write pattern: \1, with a space after the colon", message)
    if "--optimizer.groups" in message:
        message = message.replace("[a, b]", "[{pattern: visual, lr_scale: 0.1}], with a space after each colon")
    return message[:400]


def _expected(match: re.Match[str]) -> str:
    names = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "list": "a list, such as [a, b]",
        "tuple": "a list, such as [0.9, 0.95]",
    }
    wanted = names.get(match[1], match[1]) or re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", match[2] or "")
    return f"it must be {wanted}, not "
