"""The names that public formats of chat records use: which are obeyed, and why each other one is refused.

Formats: OpenAI's fine-tuning, TRL and `transformers`, axolotl, LLaMA-Factory, ms-swift, LLaVA, ShareGPT, qwen-vl-utils.
Names that are in no table here change nothing; they are reported with a count (ids, sources, categories).
"""

from __future__ import annotations

LEARNED = (
    "weight", "train", "trainable", "is_trainable", "training", "loss", "loss_mask", "loss_scale", "loss_weight",
    "include_in_loss",
)  # fmt: skip
"""Names of a turn, or of a record, that say whether it is learned: 1 or true, 0 or false."""

GOOD = ("label", "kto_tag", "desirable")
"""Names of a record or a turn by which true and false tell good answers from bad ones, also as texts; so do 1 and 0,
but of a label only beside prompt and completion: elsewhere numbers, as other texts, are classes for others."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's thoughts; a template reads one of them, and gets the thoughts by all."""

FLAGS = (
    "enable_thinking", "preserve_thinking", "thinking_mode", "reasoning_effort", "parallel_tool_calls", "documents",
    "add_vision_id",
)  # fmt: skip
"""Names of a record that a chat template may read, of which false says something too."""

BYTES, PLACES = ("bytes", "base64"), ("image", "image_url", "path", "url")
"""Names under which parts and objects hold an image, and under which they say where it is."""

IMAGE_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
VIDEO_LIMITS = (*IMAGE_LIMITS, "total_pixels", "nframes", "min_frames", "max_frames", "video_start", "video_end")
"""What an image or a video may say of how it is to be shown; the processor of a family obeys it or refuses it."""

_PAIRS = "records of preferences are not trained on: give the messages to learn"
_SOUND = "sound cannot be trained on from records: leave it out"
_TOOLS = "calls of tools are not supported: write them into the text"
_PART = "give it as a part in the turn's content"
_TURN = "give it in the assistant's turn"
_KWARGS = "put it into chat_template_kwargs"
_MASK = "give each turn that is not to be learned weight 0"
_WHOLE = "a turn is learned as a whole or not at all"
_THOUGHTS = "give the thoughts as reasoning_content and the answer as content"
_MEDIUM = "give it in the image or video that it is for"

RECORD = {
    **dict.fromkeys(("chosen", "rejected", "rejected_messages", "rejected_response", "rejected_images"), _PAIRS),
    **dict.fromkeys(("preferred_output", "non_preferred_output"), _PAIRS),
    **dict.fromkeys(("audio", "audios"), _SOUND),
    **dict.fromkeys(("functions", "function_call", "tool_choice"), "give the definitions in tools"),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), "a record is a whole conversation"),
    **dict.fromkeys(("train_on_inputs", "mask_history", "mask_prompt"), _MASK),
    **dict.fromkeys(("completion_mask", "assistant_masks", "assistant_mask", "labels_mask", "mask"), _MASK),
    **dict.fromkeys(REASONING, _TURN),
    **dict.fromkeys(FLAGS, _KWARGS),
    **dict.fromkeys((*VIDEO_LIMITS, "sample_fps", "raw_fps"), _MEDIUM),
    "tool_calls": _TOOLS,
    **dict.fromkeys(("image_path", "image_paths", "media", "attachments"), "give it in images or videos"),
    "chat_template": "put it into the model's folder",
    "system_prompt": "give it as system",
    "history": "give its turns in messages",
    "objects": "write the boxes and names into the text",
}  # fmt: skip
"""Refused names of a record, and what to do instead."""

TURN = {
    **dict.fromkeys(("tool_calls", "tool_call_id", "function_call", "tool_responses"), _TOOLS),
    **dict.fromkeys(("image", "images", "image_url", "image_path", "video", "videos", "attachments"), _PART),
    **dict.fromkeys(("audio", "audios"), _SOUND),
    **dict.fromkeys(("train_detail", "training_detail"), _WHOLE),
    **dict.fromkeys(("mask", "masked", "loss_masked", "ignore_loss"), _MASK),
    **dict.fromkeys(("tools", "functions"), "give them in tools, beside the turns"),
    **dict.fromkeys(("reasoning_details", "reasoning_text", "thinking_blocks", "channel"), _THOUGHTS),
    **dict.fromkeys(("thought", "thoughts"), _THOUGHTS),
    **dict.fromkeys(("rejected", "chosen"), _PAIRS),
    "refusal": "give its text as content",
    **dict.fromkeys(("prefix", "partial"), _WHOLE),
    "objects": "write the boxes and names into the text",
}  # fmt: skip
"""Refused names of a turn, and what to do instead."""

TEXT = {
    **dict.fromkeys((*PLACES, *BYTES, "video", "frames", "source"), "give it as a part of its own, with its type"),
    **dict.fromkeys(VIDEO_LIMITS, _MEDIUM),
    **dict.fromkeys(("audio", "input_audio"), _SOUND),
    **dict.fromkeys(LEARNED, _WHOLE),
    **dict.fromkeys(REASONING, "give the thoughts beside content, in the turn"),
}  # fmt: skip
"""Refused names of a part that is a text, and what to do instead."""

MEDIUM = {
    **dict.fromkeys(("source", "file", "file_id", "image_file"), "give a path, bytes or base64 by its name"),
    **dict.fromkeys(("audio", "input_audio"), _SOUND),
    **dict.fromkeys(("bbox", "crop"), "cut the image yourself"),
    "text": "give it as a part of its own, with its type",
    "raw_fps": "give the rate of the frames that you give as fps",
    **dict.fromkeys(("num_frames", "max_num_frames"), "give nframes or max_frames"),
    "detail": "give max_pixels, or auto",
}  # fmt: skip
"""Refused names of an image or a video, and what to do instead."""
