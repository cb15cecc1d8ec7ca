"""
Imported before vLLM, to skip the import of a package that vLLM does not need here.

The skipped package is scikit-learn, which the estimator uses; importing it takes two seconds in
each process.
"""

import sys

sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]  # an import then fails
