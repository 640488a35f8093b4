#!/bin/sh
# Back up the containers' installation while it runs: deploy/compose/backup.sh FOLDER
# Writes etcd.db, registry.tar, redis.tar, files.tar, usage-*.tar and secrets.tar. COMPOSE names the command, else `docker compose`.
set -eu
: "${COMPOSE:=docker compose}"
[ $# -eq 1 ] || { echo "usage: deploy/compose/backup.sh FOLDER" >&2; exit 2; }
umask 077
# The folder contains keys: beside sources it would be committed or shipped with them.
there=$1
while [ ! -d "$there" ]; do there=$(dirname "$there"); done
there=$(cd "$there" && pwd -P)
while [ "$there" != / ]; do
  [ ! -e "$there/.git" ] || { echo "error: $1 is in the checkout $there; next: name a folder outside it" >&2; exit 2; }
  there=$(dirname "$there")
done
mkdir -p "$1"
folder=$(cd "$1" && pwd)
# Files of an earlier backup would keep their modes.
rm -f "$folder/etcd.db" "$folder/registry.tar" "$folder/redis.tar" "$folder/files.tar" "$folder"/usage-*.tar "$folder/secrets.tar"
cd "$(dirname "$0")/../.."
[ ! -e .env ] || state=$(sed -n 's/^FLEET_STATE=//p' .env)
state=${FLEET_STATE:-${state:-.fairway/compose}}

# A container's file comes out through `docker cp`, since etcd's image has neither shell nor tar.
take() { docker cp "$($COMPOSE ps -q "$1"):$2" "$3"; }

echo "etcd: models, tags, tenants, keys, deployments"
$COMPOSE exec -T etcd etcdctl --endpoints=https://127.0.0.1:2379 --cacert=/run/fairway/tls/ca.crt --cert=/run/fairway/tls/tls.crt \
  --key=/run/fairway/tls/tls.key snapshot save /var/lib/etcd/backup.db >/dev/null
take etcd /var/lib/etcd/backup.db "$folder/etcd.db"

# After etcd: what its snapshot refers to was stored before, and chunks never change.
echo "registry: manifests and chunks"
take registry /var/lib/fairway/. - >"$folder/registry.tar"

# In this order: what a checkpoint replaces is deleted ten minutes later.
echo "usage ledger"
for part in checkpoints hours segments; do # a new ledger has no checkpoint
  take controlplane "/var/lib/fairway-usage/$part" - >"$folder/usage-$part.tar" 2>/dev/null || rm "$folder/usage-$part.tar"
done

echo "files of batches"
take gateway /var/lib/fairway-files/. - >"$folder/files.tar"

echo "redis: quotas and idempotency records"
redis() { $COMPOSE exec -T redis redis-cli --tls --cacert /run/fairway/tls/ca.crt --cert /run/fairway/tls/tls.crt \
  --key /run/fairway/tls/tls.key --no-auth-warning -a "$(cat "$state/secrets/redis_password")" "$@"; }
percentage=$(redis CONFIG GET auto-aof-rewrite-percentage | tail -n 1)
trap 'redis CONFIG SET auto-aof-rewrite-percentage "$percentage" >/dev/null' EXIT
# A rewrite in the middle of the copy would take away files that the copied manifest names.
redis CONFIG SET auto-aof-rewrite-percentage 0 >/dev/null
while redis INFO persistence | grep -q '^aof_rewrite_in_progress:1'; do sleep 1; done
take redis /data/appendonlydir - >"$folder/redis.tar"

echo "secrets"
tar -C "$state" -cf "$folder/secrets.tar" secrets
echo "done: $folder"
