"""The control plane, free of sockets, clocks and torch: what rows exist, where their cells lie, who consumed them."""

from transfer_queue.control.core import ControlCore
from transfer_queue.control.effects import PARKED, Answer, Effect, FreeBlocks, Journal, Parked

__all__ = ["PARKED", "Answer", "ControlCore", "Effect", "FreeBlocks", "Journal", "Parked"]
