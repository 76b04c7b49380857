"""What hardware is here: the inventory, the links between cards, and choosing among them.

inventory   the machine's cards, as NVML lists them
visible     which of them torch sees, and in what order
links       how they are joined
spec        what ``--cards`` may say
choose      from the three of them to the cards of a run
health      what state each card is in: clocks, errors, settings
surroundings  what limits the process and its cards: NUMA nodes, limits, networks, IOMMU
"""

from manycard.cards.card import Card
from manycard.cards.choose import DEFAULT_MIN_FREE, CardChoice, LeftOut, choose, choose_cards
from manycard.cards.health import CardHealth, Ecc, NvLinkState, Pcie, read_health
from manycard.cards.host import Host, read_host
from manycard.cards.inventory import CardInfo, Machine, MigSlice, inventory, read_machine
from manycard.cards.links import Link, Links, links
from manycard.cards.memory_size import in_words, parse_size
from manycard.cards.processes import CardProcess, own_pids
from manycard.cards.spec import CardSpec, parse_spec
from manycard.cards.surroundings import Network, Surroundings, Xid, read_surroundings
from manycard.cards.visible import Visible, map_visible, visible_now

__all__ = [
    "DEFAULT_MIN_FREE",
    "Card",
    "CardChoice",
    "CardHealth",
    "CardInfo",
    "CardProcess",
    "CardSpec",
    "Ecc",
    "Host",
    "LeftOut",
    "Link",
    "Links",
    "Machine",
    "MigSlice",
    "Network",
    "NvLinkState",
    "Pcie",
    "Surroundings",
    "Visible",
    "Xid",
    "choose",
    "choose_cards",
    "in_words",
    "inventory",
    "links",
    "map_visible",
    "own_pids",
    "parse_size",
    "parse_spec",
    "read_health",
    "read_host",
    "read_machine",
    "read_surroundings",
    "visible_now",
]
