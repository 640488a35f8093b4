"""Write clients/typescript/src/gen from the OpenAPI document and the protos. Needs `npm ci` in that folder.

The output is not committed: it follows from what is, and `make typescript` writes it before each build.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, cast

from services.gateway.faces.description.document import document_of
from services.gateway.faces.openai.exchange import REQUEST_HEADERS, BodyReader, HttpLimits
from services.gateway.faces.openai.routes import endpoints_of
from services.gateway.faces.responses.background import ResponseParts
from services.runtime.process.product import product_version

ROOT: Final = Path(__file__).resolve().parent.parent
CLIENT: Final = ROOT / "clients" / "typescript"
GENERATED: Final = CLIENT / "src" / "gen"
_TIMEOUT_S: Final = 120


def document() -> dict[str, Any]:
    """Return what a gateway serves at /openapi.json."""
    nothing = cast(Any, None)
    endpoints = endpoints_of(
        *(nothing,) * 4,
        HttpLimits(0),
        str,
        b"",
        ResponseParts(nothing, nothing, str, 0.0),
        bodies=BodyReader(0),
    )
    return document_of(endpoints, REQUEST_HEADERS, version=product_version())


def main() -> int:
    """Return 0 when everything was written."""
    tools = CLIENT / "node_modules" / ".bin"
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir(parents=True)
    api = GENERATED / "openapi.json"
    api.write_text(json.dumps(document(), indent=1), "utf-8")
    template = {
        "version": "v2",
        "plugins": [
            {
                "local": str(tools / "protoc-gen-es"),
                "out": str(GENERATED),
                "opt": ["target=ts", "import_extension=js"],
            }
        ],
    }
    buf = Path(sys.executable).parent / "buf"
    for command in (
        [
            str(tools / "openapi-typescript"),
            str(api),
            "--default-non-nullable=false",
            "-o",
            str(GENERATED / "openapi.ts"),
        ],
        [str(buf), "generate", str(ROOT / "protos"), "--template", json.dumps(template)],
    ):
        done = subprocess.run(command, cwd=CLIENT, check=False, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
