"""Models for torchtune that torchtune does not have, and what is known of those it has."""
