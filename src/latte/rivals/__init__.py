"""Models to compare with: layers of our own, other libraries' models, and their names.

Importing this registers the names (:mod:`latte.models.registry`); ``import latte`` arranges that it
is imported once a name is asked for that is none of Latte's own.
"""

from latte.models.registry import register_model
from latte.rivals.catalogue import COMPARATORS

for _comparator in COMPARATORS.values():
    register_model(_comparator)
