"""The clients of the matrix: each at a pinned version, in an environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENTS: Final = ROOT / ".venv-clients"
SCRIPTS: Final = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Client:
    """``packages``: what pip or npm is asked for; the first is the client. ``script`` drives it."""

    name: str
    packages: tuple[str, ...]
    script: str
    environment: str
    needs_torch: bool = False
    # Whether it is a program of npm's that a script in Python runs.
    is_program: bool = False

    @property
    def is_node(self) -> bool:
        """Whether its script needs its packages beside it."""
        return self.script.endswith(".mjs")

    @property
    def version(self) -> str:
        """The package and its version, as the page shows them."""
        return self.packages[0]


_LITELLM: Final = ("litellm[proxy]==1.106.12",)

CLIENTS: Final = (
    Client("openai Python", ("openai==3.57.0",), "openai_python.py", "openai-python"),
    Client("openai Node", ("openai@7.57.0",), "openai_node.mjs", "openai-node"),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_python.py", "anthropic"),
    Client("litellm SDK", _LITELLM, "litellm_sdk.py", "litellm"),
    Client("litellm proxy", _LITELLM, "litellm_proxy.py", "litellm"),
    Client("langchain-openai", ("langchain-openai==1.7.4",), "langchain_python.py", "langchain"),
    Client("instructor", ("instructor==1.17.0",), "instructor_python.py", "instructor"),
    Client(
        "pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.66.0",), "pydantic_ai_python.py", "pydantic-ai"
    ),
    Client("openai-agents", ("openai-agents==0.24.0",), "openai_agents.py", "openai-agents"),
    Client(
        "llama-index",
        (
            "llama-index-core==0.14.25",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-embeddings-openai-like==0.4.0",
        ),
        "llama_index_python.py",
        "llama-index",
    ),
    # Its torch is for tests/smollm2, which compares a served model with the same files in transformers.
    Client(
        "lm-eval",
        ("lm-eval[api,hf]==0.4.13", "transformers==5.24.0"),
        "lm_eval_python.py",
        "lm-eval",
        needs_torch=True,
    ),
    Client("guidellm", ("guidellm==0.8.1",), "guidellm_python.py", "guidellm", needs_torch=True),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_python.py", "aiperf"),
    Client(
        "Claude Code",
        ("@anthropic-ai/claude-code@2.1.332",),
        "claude_code.py",
        "claude-code",
        is_program=True,
    ),
    Client("Codex", ("@openai/codex@0.171.0",), "codex_cli.py", "codex", is_program=True),
)
