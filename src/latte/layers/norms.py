"""Normalisations, under the names the library uses."""

from torch import nn

RMSNorm = nn.RMSNorm
LayerNorm = nn.LayerNorm
