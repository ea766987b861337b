"""The supervisor's side: brings nodes together, carries events in and decisions out."""
