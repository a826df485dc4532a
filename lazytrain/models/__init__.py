"""Models as data: what each layer holds, computes and saves. Importing this package imports no torch."""

from lazytrain.models.catalogue import list_models, load_config, load_model, local_folder
from lazytrain.models.spec import Largest, LayerKind, LayerTrace, ModelSpec, Terms

__all__ = [
    "Largest",
    "LayerKind",
    "LayerTrace",
    "ModelSpec",
    "Terms",
    "list_models",
    "load_config",
    "load_model",
    "local_folder",
]
