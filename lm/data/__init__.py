"""From documents to batches: sources, tokenizer, shards, preparation, order, loader."""
