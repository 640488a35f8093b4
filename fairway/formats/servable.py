"""Whether workers and gateways can serve a checkpoint, judged by its small files and its tensors' headers.

A ``config.json`` without ``architectures`` belongs to no checkpoint: it describes a model of the null
executor, which has no weights. The architecture also decides the kind of a version: a decoder or a fixed-cost
model. The engine's own checks are applied, so that what is accepted here loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from fairway.formats import version_files
from fairway.formats.adapter import require_adapter
from fairway.formats.config_fields import UnsupportedModel, object_in
from fairway.formats.decoder_config import FAMILIES, ModelConfig, parse_config
from fairway.formats.fixed_cost.config import CONFIG, is_fixed_cost, parse_fixed_cost
from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.fixed_cost.layouts import layout_of
from fairway.formats.fixed_cost.pooling import FILES, MODULES, last_token
from fairway.formats.generation import GENERATION_CONFIG, eos_ids, sampling_defaults
from fairway.formats.limits import POLICY_NAME
from fairway.formats.probe import PROBE, require_probe, wants_probe
from fairway.formats.tokenizer_files import (
    SETTINGS,
    TOKENIZER,
    TokenizerFiles,
    read_tokenizer_files,
    require_decodable,
)
from fairway.formats.version_files import suffix_of
from fairway.formats.vllm_models import encoder_problem, require_vllm_config, require_vllm_tensors
from fairway.formats.weights import (
    INDEX,
    SINGLE,
    BadWeights,
    Read,
    decoder_layout,
    require_layout,
    weight_files,
)

Kind = Literal["causal-lm", "fixed-cost", "safety-pack"]
# Fairway's own engine, vLLM, and the gateways, which apply safety packs; by the executor of a deployment.
Engine = Literal["torch", "vllm", "gateway"]
GATEWAY: Final = "gateway"

_DRAFT: Final = f"{version_files.DRAFT_FOLDER}/"
# The small files that ``engine_problems`` reads in addition to those of a gateway.
READ: Final = (
    CONFIG,
    INDEX,
    _DRAFT + CONFIG,
    _DRAFT + INDEX,
    POLICY_NAME,
    version_files.ADAPTER_CONFIG,
    *FILES,
)


def kind_of(names: Collection[str], read: Callable[[str], bytes]) -> Kind:
    """Return the kind that the architecture in ``config.json`` has; a decoder if there is none."""
    is_fixed = CONFIG in names and is_fixed_cost(_object(read, CONFIG))
    return "fixed-cost" if is_fixed else "causal-lm"


def tensor_files(names: Collection[str], read: Read, *, is_adapter: bool = False) -> tuple[str, ...]:
    """Return the tensor files whose headers ``engine_problems`` reads; it names what is wrong."""
    found = [version_files.ADAPTER_WEIGHTS] if is_adapter else []
    found += [PROBE] if PROBE in names else []
    for folder in ("", _DRAFT):
        try:
            found += weight_files(folder, names, read)
        except (BadWeights, UnsupportedModel):
            continue
    return tuple(found)


def no_engine(problems: Mapping[Engine, str]) -> str:
    """Return why none of the engines serves a version, or an empty text."""
    if not all(problems.values()):
        return ""
    own, other = problems["torch"], problems["vllm"]
    return own if other in own else f"{own}; by vllm: {other}"


def engine_problems(
    names: Collection[str], read: Read, kind: str = "causal-lm", *, is_adapter: bool = False
) -> dict[Engine, str]:
    """Return of each engine why it cannot serve a version of this kind and these files, or an empty text.

    ``read`` returns a file of at most a few megabytes, and of a tensor file its header; its errors are passed
    on. The files of an adapter are together with those of its base.
    """
    if kind == "safety-pack":
        refused = "it is a safety pack, which gateways apply"
        return {"gateway": "", "torch": refused, "vllm": refused}
    if kind == "fixed-cost":
        own = _own_problem(names, read, kind)
        return {"torch": own, "vllm": own or encoder_problem(parse_fixed_cost(names, read))}
    if gguf := next((name for name in names if name.lower().endswith(".gguf")), ""):
        refused = f"{gguf}: no engine serves GGUF as it is; `fairway models import` converts it"
        return {"torch": refused, "vllm": refused}
    own = _own_problem(names, read, kind, is_adapter=is_adapter)
    if is_adapter:
        return {"torch": own, "vllm": own}
    try:
        return {"torch": own, "vllm": _vllm_problem(names, read, own)}
    except (UnsupportedModel, BadWeights) as refused:
        return {"torch": own, "vllm": str(refused)}


def _own_problem(names: Collection[str], read: Read, kind: str, *, is_adapter: bool = False) -> str:
    try:
        if kind == "fixed-cost":
            _require_fixed_cost(names, read)
        else:
            _require_decoder(names, read)
        if is_adapter:
            require_adapter(read, _config(CONFIG, object_in(CONFIG, read)))
    except UnsupportedModel as refused:
        return f"{refused} by the {'batcher' if kind == 'fixed-cost' else 'engine'}"
    except BadWeights as refused:
        return str(refused)
    return ""


def _vllm_problem(names: Collection[str], read: Read, own: str) -> str:
    """Return why vLLM cannot serve a decoder; ``own`` is the reason of Fairway's engine.

    A family of that engine is judged by it, unless its weights are quantised. Raises UnsupportedModel,
    BadWeights.
    """
    if code := next((name for name in names if suffix_of(name) in version_files.CODE_SUFFIXES), ""):
        return f"{code}: no engine runs program code of a version"
    fields = object_in(CONFIG, read) if CONFIG in names else {}
    if "architectures" not in fields and SINGLE not in names and INDEX not in names:
        return own or "a model without weights is served by the null executor"
    vocab_size = require_vllm_config(fields)
    if wants_probe(names, read):
        return f"{POLICY_NAME}: probe: vLLM's workers do not pass on the hidden states that it judges"
    if fields.get("quantization_config") is None and fields["architectures"][0] in FAMILIES:
        return own
    if GENERATION_CONFIG in names:
        sampling_defaults(object_in(GENERATION_CONFIG, read))
    eos_ids(names, read, fields, vocab_size)
    require_vllm_tensors(fields, names, read)
    require_decodable(_tokenizer(names, read, vocab_size).tokenizer)
    _require_embedding(fields["hidden_size"], names, read)
    if any(name.startswith(_DRAFT) for name in names):
        return f"{_DRAFT}: a version that vLLM serves has no draft"
    return ""


def _require_decoder(names: Collection[str], read: Read) -> None:
    fields = object_in(CONFIG, read) if CONFIG in names else {}
    if GENERATION_CONFIG in names:
        sampling_defaults(object_in(GENERATION_CONFIG, read))
    if "architectures" not in fields and SINGLE not in names and INDEX not in names:
        eos_ids(names, read, fields, 0)
        return
    if is_fixed_cost(fields):
        raise BadWeights(
            f"{CONFIG}: {fields['architectures'][0]} is a fixed-cost model, not one of kind causal-lm"
        )
    config = _config(CONFIG, fields)
    eos_ids(names, read, fields, config.vocab_size)
    require_layout("", names, read, decoder_layout(config))
    require_probe(names, read, config.hidden_size)
    require_decodable(_tokenizer(names, read, config.vocab_size).tokenizer)
    _require_embedding(config.hidden_size, names, read)
    if _DRAFT + CONFIG in names:
        _require_draft(names, read, config)


def _require_embedding(hidden_size: int, names: Collection[str], read: Read) -> None:
    """Return if a decoder's files declare no embedding, or one of its last token. Raises BadWeights."""
    try:
        if MODULES in names:
            last_token(hidden_size, 1, names, lambda name: json.loads(read(name)))
    except (UnsupportedModel, ValueError, RecursionError) as error:
        raise BadWeights(f"how it embeds: {error}") from error


def _require_draft(names: Collection[str], read: Read, config: ModelConfig) -> None:
    fields = object_in(_DRAFT + CONFIG, read)
    draft = _config(_DRAFT + CONFIG, fields)
    if draft.vocab_size != config.vocab_size:
        raise BadWeights(
            f"{_DRAFT}{CONFIG}: a vocabulary of {draft.vocab_size} is not the model's {config.vocab_size}"
        )
    try:
        eos_ids((), read, fields, draft.vocab_size)
        require_layout(_DRAFT, names, read, decoder_layout(draft))
    except (BadWeights, UnsupportedModel) as refused:
        raise BadWeights(f"the draft: {refused}") from refused


def _require_fixed_cost(names: Collection[str], read: Read) -> None:
    if any(name.startswith(_DRAFT) for name in names):
        raise BadWeights(f"{_DRAFT}: a fixed-cost model has no draft")
    if PROBE in names or wants_probe(names, read):
        raise BadWeights(f"{PROBE}: a fixed-cost model has no output for a probe to judge")
    config = parse_fixed_cost(names, read)
    require_layout("", names, read, layout_of(config))
    if isinstance(config, EncoderConfig):
        _tokenizer(names, read, config.vocab_size)


def _tokenizer(names: Collection[str], read: Read, vocab_size: int) -> TokenizerFiles:
    if TOKENIZER not in names:
        raise BadWeights(f"{TOKENIZER} is missing: gateways need it to tokenize text")
    files = read_tokenizer_files(names, read)
    for text, token in files.outside.items():
        if token >= vocab_size:
            raise UnsupportedModel(
                f"the token {text[:80]!r} is declared beside {TOKENIZER}, which lacks it, and the model's "
                f"vocabulary of {vocab_size} has no id for it: remove it, or enlarge the embedding; id",
                token,
            )
    return files


def _config(name: str, fields: Mapping[str, Any]) -> ModelConfig:
    try:
        return parse_config(fields)
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{name}: {refused.field}", refused.value) from refused


def checkpoint_warnings(names: Collection[str], read: Read, kind: str = "causal-lm") -> tuple[str, ...]:
    """Return what a servable version may not mean, each in a sentence."""
    if kind != "causal-lm" or TOKENIZER not in names or CONFIG not in names:
        return ()
    files, fields = read_tokenizer_files(names, read), object_in(CONFIG, read)
    end = files.named.get("eos_token", "")
    token = files.ids.get(end)
    if token is None or token in eos_ids(names, read, fields, token + 1):
        return ()
    where = GENERATION_CONFIG if GENERATION_CONFIG in names else CONFIG
    return (
        f"{SETTINGS} has the eos_token {end[:80]!r}, id {token}, which eos_token_id of {where} lacks: "
        "outputs do not end there, as in transformers (in vLLM they do); add the id if they should",
    )


def _object(read: Callable[[str], bytes], name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is none."""
    try:
        found = json.loads(read(name))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
