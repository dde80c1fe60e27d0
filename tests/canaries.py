"""Secrets that tests plant: settings as people write them, each holding a canary that must not be found anywhere."""

from __future__ import annotations

from pathlib import Path

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEcanary-pem\n-----END RSA PRIVATE KEY-----"

# Each value holds the word `canary`; the names are those of real libraries and of real people's environments.
SECRET_SETTINGS = {
    "spark.hadoop.fs.azure.account.key.acme.dfs.core.windows.net": "canary-azure-key",
    "spark.hadoop.fs.azure.sas.container.acme": "canary-sas",
    "spark.hadoop.fs.azure.account.oauth2.client.secret": "canary-oauth-secret",
    "spark.hadoop.fs.s3a.access.key": "canary-s3-access", "spark.hadoop.fs.s3a.secret.key": "canary-s3-secret",
    "spark.hadoop.fs.s3a.session.token": "canary-s3-token",
    "spark.hadoop.google.cloud.auth.service.account.private.key": "canary-gcs-private",
    "spark.hadoop.javax.jdo.option.ConnectionPassword": "canary-metastore",
    "spark.executorEnv.DB_PASSWD": "canary-passwd", "spark.executorEnv.WANDB_API_KEY": "canary-api-key",
    "spark.executorEnv.SENTRY_DSN": "canary-dsn", "spark.executorEnv.MYSQL_PWD": "canary-pwd",
    "spark.executorEnv.BASIC_AUTH": "canary-auth", "spark.app.signing": PEM,
    "spark.app.jdbc": "jdbc:postgresql://db/images?user=etl&password=canary-jdbc&ssl=true",
    "spark.app.sqlserver": "jdbc:sqlserver://db;databaseName=x;user=etl;Pwd=canary-sqlserver;encrypt=true",
    "spark.app.oracle": "jdbc:oracle:thin:etl/canary-oracle@db:1521/x",
    "spark.app.proxy": "https://proxy-user:canary-proxy@proxy:3128/",
    "spark.app.azure": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=canary-account==;EndpointSuffix=x",
    "spark.app.blob": "https://acme.blob.core.windows.net/c/b?sv=2024&sp=r&sig=canary-sig%3D&se=2026",
    "spark.app.aws": "AKIACANARYCANARYCANA canary/canary+canary/canary+canary/cana1",
    "spark.app.header": "Authorization: Bearer canary.bearer.value",
}  # fmt: skip
# Variables of the driver alone.
DRIVERS_OWN = {
    "DATABASE_URL": "postgresql://etl:canary-database@db/images",
    "HF_TOKEN": "canary-hugging-face",
    "GOOGLE_APPLICATION_CREDENTIALS_JSON": '{"private_key": "canary-google"}',
}
PLAIN_SETTINGS = {
    "spark.executor.memory": "2g",
    "spark.sql.shuffle.partitions": "8",
    "spark.hadoop.fs.s3a.endpoint": "https://s3.example.org:9000",
}


def toml_table(settings: dict[str, str]) -> str:
    """The settings as an inline TOML table."""
    import json

    return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in settings.items()) + "}"


def files_with_canaries(*roots: Path) -> list[str]:
    """Every file below `roots` that holds a canary, whatever its case."""
    return [
        str(path)
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.is_file() and b"canary" in path.read_bytes().lower()
    ]


def write_config(folder: Path, **settings: str) -> Path:
    """A config whose two Spark applications carry every planted secret."""
    conf = toml_table({**SECRET_SETTINGS, **settings})
    file = folder / "planted" / "c.toml"
    file.parent.mkdir()
    file.write_text(
        f'[source]\nuri = "{folder}/images"\n[dataset]\nuri = "{folder}/dataset"\n'
        '[etl]\nengine = "spark"\nimage_size = 16\n'
        f"[train]\nepochs = 1\nglobal_batch_size = 16\n[spark.etl]\nconf = {conf}\n[spark.train]\nconf = {conf}\n"
    )
    return file
