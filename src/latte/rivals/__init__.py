"""The layers that the paper compares with and no kept library offers, one file each."""

from latte.rivals.base import ComparatorMixer
from latte.rivals.h3 import H3
from latte.rivals.linformer import Linformer
from latte.rivals.luna import Luna
from latte.rivals.mega import Mega
from latte.rivals.s5 import S5

__all__ = ["H3", "S5", "ComparatorMixer", "Linformer", "Luna", "Mega"]
