"""These tests need Prometheus and Alertmanager on the PATH, and are skipped as a whole where they are not."""

from __future__ import annotations

from tests.prometheus.servers import MISSING

collect_ignore_glob = ["test_*.py"] if MISSING else []
