"""LazyTrain: plan, check in simulation, and run large-model training on limited hardware."""

__version__ = "0.1.0"
