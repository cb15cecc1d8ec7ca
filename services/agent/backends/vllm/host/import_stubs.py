"""
Imported before vLLM to skip imports of vLLM's dependencies that are not needed.

The skipped import is scikit-learn, where it is installed for the estimator: it takes two seconds in
each process.
"""

import sys

sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]  # an import then fails
