"""What a run wrote about itself."""
