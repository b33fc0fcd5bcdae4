"""SGLang engines: their processes, requests, commits of new weights, and the dispatcher between their replicas."""
