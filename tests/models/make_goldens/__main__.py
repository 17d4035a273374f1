"""Makes the golden files of the model families from transformers: python -m tests.models.make_goldens [FOLDER]

Needs torch, torchvision, transformers and peft; the tests that read the files need none of them. For each family a
folder with a tiny random model, and per case one file: inputs, position ids, logits, loss, and every gradient by name;
the files of its processors, and a file of what they make of some pictures; for adapters, as peft saves them, and for
heads of multi-token prediction what these make of a case. Of the configuration classes: the names and defaults of their
fields, and what they make of changed config.json's.

Made again on the same kind of machine, with the same versions, the files are the same to the last bit.
"""

import argparse
import pathlib

import torch

from tests.models.make_goldens import configs, gemma4, peft_fields, processing, qwen3_5, step3p7

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"

parser = argparse.ArgumentParser(prog="python -m tests.models.make_goldens", description=__doc__)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default=GOLDENS, help="default: that of the tests")
root = parser.parse_args().folder
root.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(2)  # the order of sums, and so their last bits, is that of the threads
for make in (
    gemma4.gemma4, processing.gemma4_processing, qwen3_5.qwen3_5, qwen3_5.adapters, processing.qwen3_5_processing,
    qwen3_5.qwen3_5_moe, step3p7.step3p7, processing.step3p7_processing, configs.configs,
    peft_fields.peft_fields,
):  # fmt: skip
    make(root)
