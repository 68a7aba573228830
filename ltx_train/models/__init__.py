"""What the networks are; knows no dataset and no job."""
