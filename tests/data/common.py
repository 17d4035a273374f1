"""What the tests of data share: chat templates, and a tiny Hugging Face folder with a tokenizer trained on the spot."""

import io
import json
import pathlib

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.models.pictures import picture
from tests.models.qwen3_5_cases import FOLDER

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|begin|>", "<|header|>", "<|eot|>",
]  # fmt: skip

# Adds a system turn when there is none, shows media as the family does, and opens the last answer with empty thinking;
# thinking in earlier answers is dropped.
QWEN_LIKE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' -%}
{%- if loop.last -%}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif -%}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else -%}{{ show(message.content) }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""

# Strips every turn, refuses roles that do not alternate, begins with a special token, and marks its answers.
LLAMA_LIKE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' and loop.index0 % 2 != (1 if messages[0]['role'] == 'system' else 0) %}
{{- raise_exception('turns must alternate') }}
{%- endif %}
{{- '<|header|>' + message['role'] + '\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] | trim }}{{- '<|eot|>' }}{%- endgeneration %}
{%- else %}{{- message['content'] | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\\n\\n' }}{%- endif %}
"""

# Shows the thoughts of answers after the last question alone, given apart or in the text, and opens prompts with them
# unless told not to; definitions of tools come first; every text is trimmed.
THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set seen = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set text = message.content | trim %}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
{%- if message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content or '' %}
{%- if not thoughts and '</think>' in text %}
{%- set thoughts = text.split('</think>')[0].split('<think>')[-1] %}
{%- set text = text.split('</think>')[-1] | trim %}
{%- endif %}
{%- if loop.index0 > seen.last %}{{- '<think>\\n' + thoughts | trim + '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
{{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Strips the thoughts from the text of every answer; asks with empty thoughts, which no answer has.
STRIPPING = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|header|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.reasoning and enable_thinking %}{{- '<think>' + message.reasoning + '</think>' }}{%- endif %}
{%- for piece in (message.content if message.content is string else message.content[0].text).split('</think>') %}
{{- piece.split('<think>')[0] | trim }}
{%- endfor %}
{{- '<|eot|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>model\\n' }}
{%- if not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""

# Shows thoughts in all answers, and has no prompt; turns that are empty are left out.
PLAIN = """\
{%- for message in messages %}
{%- if message.content %}{{ message.role }}: {% if message.thinking %}({{ message.thinking }}) {% endif %}
{{- message.content + '<|eot|>\\n' }}
{%- endif %}
{%- endfor %}
"""

WORDS = """the cat sat on a mat and saw two birds in the garden; what is in this picture? there are three red boats and
a small dog. why is the sky blue, how many of them can you count, describe each image in one short sentence please"""


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE; like some in the wild, its post-processor takes spaces from the places of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


def make_folder(path: pathlib.Path, template: str = QWEN_LIKE, **model: object) -> pathlib.Path:
    """All of a Hugging Face folder but its weights; `model` changes text_config."""
    path.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    (path / "chat_template.jinja").write_text(template)
    config = json.loads((FOLDER / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 320, "pad_token_id": 0} | model
    for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start",) * 2, ("vision_end",) * 2):
        config[f"{name}_token_id"] = SPECIAL.index(f"<|{token}|>")
    (path / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text((FOLDER / name).read_text())
    return path


def png(height: int = 24, width: int = 32, turn: int = 0) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    Image.fromarray(picture(height, width, turn)).save(out, "PNG")
    return out.getvalue()


def write_jsonl(path: pathlib.Path, records: list) -> pathlib.Path:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(*turns, **more) -> dict:
    """A record of messages: user, assistant, user ..."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)], **more}


def random_chats(count: int, seed: int = 0) -> list:
    """Records of one or two turns, some with an image in `images` (bytes cannot be in JSON, so base64)."""
    import base64

    rng = np.random.default_rng(seed)
    words = WORDS.split()
    records = []
    for number in range(count):
        turns = [" ".join(rng.choice(words, rng.integers(2, 9))) for _ in range(rng.choice([2, 4]))]
        images = []
        for turn in range(0, len(turns), 2):
            if rng.random() < 0.5:
                size = rng.integers(12, 40, 2).tolist()
                images.append("data:image/png;base64," + base64.b64encode(png(*size, turn=number)).decode())
                turns[turn] = "<image>" + turns[turn]
        records.append(chat(*turns, **({"images": images} if images else {})))
    return records
