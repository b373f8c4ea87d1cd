"""What lets a killed run go on: the state of training, its checkpoints, deaths to try it on."""
