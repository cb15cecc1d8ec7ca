"""
Whoever imports this before vLLM does without what vLLM's dependencies would only import in vain.

That is scikit-learn, where it is installed for the estimator: two seconds for each process.
"""

import sys

sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]  # an import then fails
