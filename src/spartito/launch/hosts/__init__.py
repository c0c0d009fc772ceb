"""Tasks on other machines, over ssh."""
