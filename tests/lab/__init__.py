"""What tests are made of: tiers, datasets, trainings, commands, recorders."""
