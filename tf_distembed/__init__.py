"""TensorFlow-first embedding tables for recommender and ranking models.

```python
import tf_distembed as tde

movie = tde.TableConfig("movie", 1_682, 16, optimizer="adagrad")
layer = tde.DistributedEmbedding({"movie": tde.FeatureConfig("movie", movie)})
```
"""

from tf_distembed._tensorflow_guard import check_tensorflow

check_tensorflow()

import importlib  # noqa: E402
import sys  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

__version__ = "0.1.0"

# Public name -> the module that has it. Loaded at first use, so that the
# command line answers --help without TensorFlow.
_PUBLIC = {
    "DistributedEmbedding": "layer",
    "EmbedReduce": "embed_reduce",
    "FeatureConfig": "config",
    "TableConfig": "config",
    "TableLearningRateScheduler": "callbacks",
    "distribute_dataset": "distributed_data",
    "export_for_serving": "serving",
    "fit": "training",
    "load_tables": "state",
    "make_eval_step": "steps",
    "make_predict_step": "steps",
    "make_strategy": "strategy",
    "make_train_step": "steps",
    "save_tables": "state",
}
_SUBPACKAGES = ("datasets", "testing")

__all__ = [
    "DistributedEmbedding",
    "EmbedReduce",
    "FeatureConfig",
    "TableConfig",
    "TableLearningRateScheduler",
    "distribute_dataset",
    "export_for_serving",
    "fit",
    "load_tables",
    "make_eval_step",
    "make_predict_step",
    "make_strategy",
    "make_train_step",
    "save_tables",
]

if TYPE_CHECKING:
    from tf_distembed.callbacks import TableLearningRateScheduler
    from tf_distembed.config import FeatureConfig, TableConfig
    from tf_distembed.distributed_data import distribute_dataset
    from tf_distembed.embed_reduce import EmbedReduce
    from tf_distembed.layer import DistributedEmbedding
    from tf_distembed.serving import export_for_serving
    from tf_distembed.state import load_tables, save_tables
    from tf_distembed.steps import (
        make_eval_step,
        make_predict_step,
        make_train_step,
    )
    from tf_distembed.strategy import make_strategy
    from tf_distembed.training import fit
elif sys.argv[:1] != ["-m"]:
    # Keras finds a saved model's layers once their modules are imported. While
    # `python -m` looks for a command line, nothing is.
    from tf_distembed import embed_reduce, layer  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES, "__version__"])
