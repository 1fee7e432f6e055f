"""Search for layouts: the search problems of training and serving a model."""
