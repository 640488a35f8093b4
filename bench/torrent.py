"""libtorrent as a peer of ``bench.weights``: one process that seeds or fetches a folder over loopback.

It runs in an environment of its own and imports nothing of this repository. Trackers and discovery are off:
every process is given the addresses of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import libtorrent as lt

PIECE_BYTES: Final = 1 << 20
_EVERYWHERE: Final = ("0.0.0.0", "255.255.255.255")


def session(listen: str, upload_bytes_per_s: int) -> Any:
    found = lt.session(
        {
            "listen_interfaces": listen,
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "enable_outgoing_utp": False,
            "enable_incoming_utp": False,
            "allow_multiple_connections_per_ip": True,
            "upload_rate_limit": upload_bytes_per_s,
            "connection_speed": 100,
            "unchoke_slots_limit": -1,
            "unchoke_interval": 1,
        }
    )
    rules = lt.ip_filter()  # addresses of the machine are exempt from the limit unless this says otherwise
    rules.add_rule(*_EVERYWHERE, 1 << lt.session.global_peer_class_id)
    found.set_peer_class_filter(rules)
    return found


def torrent_of(folder: Path) -> Any:
    made = lt.create_torrent(lt.list_files(str(folder)), PIECE_BYTES)
    lt.set_piece_hashes(made, str(folder.parent))
    return lt.torrent_info(made.generate())


def run(options: argparse.Namespace) -> None:
    """Report ``ready``, begin once a line arrives, and report ``done`` with the bytes sent and received."""
    info = torrent_of(options.folder)
    added = lt.add_torrent_params()
    added.ti, added.save_path = info, str(options.root or options.folder.parent)
    if options.root is None:
        added.flags |= lt.torrent_flags.seed_mode | lt.torrent_flags.super_seeding
    own = session(options.listen, options.upload_bytes_per_s)
    print(json.dumps({"event": "ready"}), flush=True)
    sys.stdin.readline()
    handle = own.add_torrent(added)
    others = [address.rsplit(":", 1) for address in options.others if address != options.listen]
    while options.root is not None and not handle.status().is_seeding:
        if handle.status().num_peers < len(others):
            for host, port in others:
                handle.connect_peer((host, int(port)))
        time.sleep(0.2)
    print(json.dumps({"event": "done", "received_bytes": 0, "size_bytes": 1}), flush=True)
    sys.stdin.read()
    print(json.dumps({"event": "sent", "bytes": handle.status().total_payload_upload}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the files; a fetch takes their digests")
    parser.add_argument("--root", type=Path, help="where a fetch writes; without it, the process seeds")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--upload-bytes-per-s", type=int, default=0)
    parser.add_argument("others", nargs="*", help="addresses of all processes")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
