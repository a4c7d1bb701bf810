"""The whole loop on one machine: embedded servers and every service."""
