"""Plan a pipeline: measure a model, search for what fits the devices and is fastest, and say why."""
