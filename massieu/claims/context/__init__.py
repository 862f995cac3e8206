"""In-context learning: constructions, trained layers and predictors."""
