"""Models to compare with: layers of our own, other libraries' models, and their names.

Importing this module registers the names (:mod:`latte.models.registry`). ``import latte`` does not
import it. It is imported when a program first uses a name that is not one of Latte's own.
"""

from latte.lab.baselines.catalogue import BASELINES
from latte.models.registry import register_model

for _baseline in BASELINES.values():
    register_model(_baseline)
