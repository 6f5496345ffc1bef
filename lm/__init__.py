"""Build, train and deploy GPT-style language models in TensorFlow, from a laptop to a cluster."""
