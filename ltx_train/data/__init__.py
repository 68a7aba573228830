"""From clips to batches; knows no network."""
