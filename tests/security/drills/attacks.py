"""Every attack, in the order in which a run makes them."""

from __future__ import annotations

from typing import Final

from tests.security.drills.crowds import CROWDS
from tests.security.drills.filling import FILLING
from tests.security.drills.framing import FRAMING
from tests.security.drills.ledger import LEDGER
from tests.security.drills.stores import ETCD, STORES
from tests.security.drills.strangers import STRANGERS
from tests.security.drills.target import Attack
from tests.security.drills.tenants import COLD, TENANTS
from tests.security.drills.versions import VERSIONS

_OF_TENANTS: Final = (*TENANTS, *CROWDS, *FILLING)
_OF_OPERATORS: Final = (*VERSIONS, *LEDGER, *STORES)
ATTACKS: Final[tuple[Attack, ...]] = (*STRANGERS, *FRAMING, *_OF_TENANTS, *_OF_OPERATORS, COLD, ETCD)
