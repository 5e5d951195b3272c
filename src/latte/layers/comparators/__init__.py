"""The layers that the paper compares with and no kept library offers, one file each."""

from latte.layers.comparators.base import ComparatorMixer
from latte.layers.comparators.h3 import H3
from latte.layers.comparators.linformer import Linformer
from latte.layers.comparators.luna import Luna
from latte.layers.comparators.mega import Mega
from latte.layers.comparators.s5 import S5

__all__ = ["H3", "S5", "ComparatorMixer", "Linformer", "Luna", "Mega"]
