"""Charts that the page draws itself, in its own colours and as wide as the screen: bars, curves, heat maps of gains."""
