"""Where endpoints are found: lists of URLs, DNS, files, Kubernetes."""
