"""These scripts are run by test_verify, each as a training of its own; pytest leaves them alone."""

collect_ignore_glob = ["*.py"]
