"""Hardware profiles: what a machine is, as data with provenance, and how to measure one.

``load_machine("rtx-3090-desktop")`` reads a shipped machine or a file; ``lazytrain.hwprofiles.calibrate`` measures the
machine it runs on. Importing this package does not import torch.
"""

from lazytrain.hwprofiles.loader import (
    dump_machine,
    list_machines,
    list_parts,
    load_gpu,
    load_host,
    load_link,
    load_machine,
    load_nvme,
    save_machine,
)
from lazytrain.hwprofiles.quantity import Quantity, RatePoint, RateTable
from lazytrain.hwprofiles.schema import Gpu, Host, Link, Machine, Nvme

__all__ = [
    "Gpu",
    "Host",
    "Link",
    "Machine",
    "Nvme",
    "Quantity",
    "RatePoint",
    "RateTable",
    "dump_machine",
    "list_machines",
    "list_parts",
    "load_gpu",
    "load_host",
    "load_link",
    "load_machine",
    "load_nvme",
    "save_machine",
]
