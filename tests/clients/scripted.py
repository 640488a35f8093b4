"""A model that answers by a script: calls of an agent's own tools, one per turn, and then a text.

Each piece of the script is a token of its own, and the next token depends on the last one alone: attention
and MLP are zero, and the output row of a piece is the embedding of what precedes it. The chat template writes
the whole conversation, and then the mark of the step, by the tools that are offered and their results.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tests.clients.models import CHECKPOINT, TEMPLATE

# What an agent does with the file of the harness, and how it ends.
DONE: Final = "The word is two now."
SCRIPTS: Final[dict[str, tuple[str | tuple[str, dict[str, Any]], ...]]] = {
    "Edit": (
        ("Read", {"file_path": "notes.txt"}),
        ("Edit", {"file_path": "notes.txt", "old_string": "is one", "new_string": "is two"}),
        DONE,
    ),
    "exec_command": (("exec_command", {"cmd": "sed -i 's/is one/is two/' notes.txt"}), DONE),
    "none": (DONE,),
}
CONTEXT: Final = 131_072
_HIDDEN: Final = 256
_END: Final = 1
_MARK: Final = """\
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- set script = 'Edit' if 'Edit' in names else 'exec_command' if 'exec_command' in names else 'none' %}
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{%- if add_generation_prompt %}{{- '<|' + script + ' ' + results | string + '|>' }}{%- endif %}
"""


def scripted_version(folder: Path) -> Path:
    """Write the model; return its folder."""
    shutil.copytree(CHECKPOINT, folder)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    config, tokenizer, settings = (json.loads((folder / name).read_text()) for name in names)
    ids, following = dict[str, int](), dict[int, int]()
    for tool, steps in SCRIPTS.items():
        for number, step in enumerate(steps):
            texts = (f"<|{tool} {number}|>", *_pieces(step))
            for text in texts:
                ids.setdefault(text, config["vocab_size"] + len(ids))
            following |= dict(pairwise([*(ids[text] for text in texts), _END]))
    tokenizer["added_tokens"] += [_token(one, text) for text, one in ids.items()]
    size = config["vocab_size"] + len(ids)
    config |= {"vocab_size": size, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
    settings |= {"chat_template": TEMPLATE + _MARK, "model_max_length": CONTEXT}
    for name, content in zip(names, (config, tokenizer, settings), strict=True):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    save_file(_weights(size, config["intermediate_size"], following), folder / "model.safetensors")
    return folder


def _pieces(step: str | tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return the texts of a step's tokens. None is in angles, for such a token has no bytes in a grammar."""
    if isinstance(step, str):
        return (step,)
    name, arguments = step
    return (f'<tool_call>\n{{"name": "{name}", "arguments": ', json.dumps(arguments), "}\n</tool_call>")


def _token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": text.startswith("<|")}


def _weights(vocab_size: int, mlp_size: int, following: dict[int, int]) -> dict[str, torch.Tensor]:
    """Return weights by which each token of the script is followed by its next, and any other by the end."""
    embeddings, outputs = torch.zeros(vocab_size, _HIDDEN), torch.zeros(vocab_size, _HIDDEN)
    embeddings[:, 0] = 1
    outputs[_END, 0] = 100
    for place, (token, after) in enumerate(following.items(), 1):
        if after != _END:
            embeddings[token] = torch.nn.functional.one_hot(torch.tensor(place), _HIDDEN)
            outputs[after, place] = 100
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (64, _HIDDEN),
        "self_attn.k_proj": (32, _HIDDEN),
        "self_attn.v_proj": (32, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, 64),
        "mlp.gate_proj": (mlp_size, _HIDDEN),
        "mlp.up_proj": (mlp_size, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, mlp_size),
    }
    found = {f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    found |= {f"{name}.weight": torch.ones(_HIDDEN) for name in norms}
    found |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": outputs}
    return {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}
