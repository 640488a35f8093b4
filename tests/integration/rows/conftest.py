from tests.support.rows_fixtures import folders, gateway

__all__ = ["folders", "gateway"]
