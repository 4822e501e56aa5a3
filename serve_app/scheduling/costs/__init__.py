"""What requests cost: the engines' time that they use, and the delay that they impose on others."""
