"""Write a checkpoint of the benchmark as a GGUF file in float32, for llama.cpp.

``python -m bench.engines.peers.gguf_file CHECKPOINT FILE``, in an environment with gguf and safetensors. The
vocabulary is a placeholder: only token ids are exchanged.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

TOP: Final[Mapping[str, str]] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PER_LAYER: Final[Mapping[str, str]] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SPECIAL: Final = ("<unk>", "<s>", "</s>")
BYTES: Final = 256
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types of the format


def main(checkpoint: str, file: str) -> None:
    gguf: Any = importlib.import_module("gguf")
    load: Any = importlib.import_module("safetensors.numpy").load_file
    fields = json.loads((Path(checkpoint) / "config.json").read_text())
    writer = gguf.GGUFWriter(file, fields["model_type"])
    add_shape(writer, fields)
    add_vocabulary(writer, fields["vocab_size"])
    for name, tensor in load(Path(checkpoint) / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), permuted(name, tensor, fields))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, fields: Mapping[str, Any]) -> None:
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_file_type(0)  # all float32


def add_vocabulary(writer: Any, size: int) -> None:
    plain = size - len(SPECIAL) - BYTES
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(BYTES)), *(f"t{n}" for n in range(plain))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(SPECIAL) + BYTES) + [-float(n) for n in range(plain)])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL] + [BYTE] * BYTES + [NORMAL] * plain)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def gguf_name(name: str) -> str:
    """Return the format's name of a tensor."""
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{PER_LAYER[rest.removesuffix('.weight')]}.weight"


def permuted(name: str, tensor: Any, fields: Mapping[str, Any]) -> Any:
    """Return q and k of a Llama with the rotary embedding's pairs side by side, as that graph reads them."""
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    projection = name.split(".")[-2]
    if fields["model_type"] != "llama" or projection not in heads:
        return tensor
    count = heads[projection]
    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
