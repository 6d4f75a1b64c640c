"""One controller, many workers: the controller decides, workers carry out its plans and report."""
