"""``python -m services ROLE`` runs one role, configured by FAIRWAY_ variables."""

from services.app.main import main

if __name__ == "__main__":
    main()
