BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE api_keys (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	slo_class VARCHAR(64), 
	requests_per_minute INTEGER, 
	enqueued_tokens BIGINT, 
	concurrent_batches INTEGER, 
	created_at FLOAT NOT NULL, 
	revoked_at FLOAT, stored_bytes BIGINT, concurrent_calls INTEGER, max_weight FLOAT, min_deadline_s FLOAT, 
	UNIQUE (id)
);
INSERT INTO "api_keys" VALUES(1,'key_000000000001','team-a','user','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','gold',60,1000000,4,1700000000.0,NULL,1000000000,8,2.0,3600.0);
INSERT INTO "api_keys" VALUES(2,'key_000000000002','ops','admin','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',NULL,NULL,NULL,NULL,1700000001.0,1700000002.0,NULL,NULL,NULL,NULL);
CREATE TABLE attempts (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	num_attempts INTEGER NOT NULL, 
	PRIMARY KEY (job_seq, "row")
);
INSERT INTO "attempts" VALUES(3,1,2);
CREATE TABLE batches (
	job_seq INTEGER NOT NULL, 
	owner VARCHAR(64), 
	input_file_id TEXT NOT NULL, 
	endpoint VARCHAR(64) NOT NULL, 
	completion_window VARCHAR(64) NOT NULL, 
	metadata TEXT, 
	output_expires_after_s INTEGER, 
	model TEXT, 
	errors TEXT, 
	output_file_id VARCHAR(64), 
	error_file_id VARCHAR(64), 
	num_reasoning_tokens BIGINT, 
	idempotency_hash VARCHAR(64), 
	request_hash VARCHAR(64) NOT NULL, num_enqueued_tokens BIGINT, record_bytes BIGINT, 
	PRIMARY KEY (job_seq), 
	UNIQUE (idempotency_hash)
);
INSERT INTO "batches" VALUES(9,'key_000000000001','file-000000000000000000000001','/v1/chat/completions','24h','{"team": "eval \u00e9"}',3600,'fake',NULL,'file-000000000000000000000003','file-000000000000000000000004',0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',420,23);
INSERT INTO "batches" VALUES(10,NULL,'file-none','/v1/chat/completions','24h',NULL,NULL,NULL,'[{"code": "invalid_request", "message": "Cannot find file file-none, or organization batchrun does not have access to it.", "param": "file_id", "line": null}]',NULL,NULL,NULL,NULL,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,158);
INSERT INTO "batches" VALUES(11,NULL,'file-000000000000000000000001','/v1/chat/completions','24h',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,0);
CREATE TABLE bodies (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	content BLOB NOT NULL, 
	PRIMARY KEY (job_seq, "row")
);
INSERT INTO "bodies" VALUES(1,1,X'28B52FFD2469CD02001286131790296D136A65EF77175FA2499034D8FFF15C3567DD0D4249909CD07DEACB1D83734C34B848F2290C82CBBC799B6A5CC49B658F7FB1A1875199EF50FE43B808A0CC8B2B241A05CAFC33A8C718050200EF19450C8A1EACA7BCF5');
INSERT INTO "bodies" VALUES(1,2,X'28B52FFD245EAD0200E2C4111980B76D9A8A6C072D3AC60EA1D05419688EF59807606FC89A0607C472B619F11E89D8E6A540A3CD15410757E5AFE0CC9636F60CB042BBB9EEC4F16617B29D84923B72991470860300544843ABECDDED7402609BACFC');
INSERT INTO "bodies" VALUES(1,0,X'28B52FFD246EED02006286141880A96D5C1BA5F9BB88B735DBC628248989D4809A2C8A0B024BB07CD07DEACFA5C1714C2C6C643951510A22900C9BF1E66D2AB2116F9E3DFEC7054D56667CC6F9CF6023C58C134748B40298F10FA11EC82A0200245440312865E4C575F3');
INSERT INTO "bodies" VALUES(2,4,X'28B52FFD2469BD02001206131690296D5397ECFDEEE25B7C4905BF998FCC48CE98F98447708CD07DEAED8E41714C2C98C8F1DE0C5379F336B59888376D8FBFD9D0C386CA67B0FF0E2602A072E2088936012AFF0A6A516C020200EF19450C8A1EC916D7AB');
INSERT INTO "bodies" VALUES(3,0,X'28B52FFD246ABD0200E2C5121780A96D7C9F347F17718B2F8D116142674629982C8A0B0229908CD07DEAC91D8139E648DE1F24B8CC9BB7A9C535BC49F6F8131BF41895F90AE4BF836B14654EDC20D10850E65F4135C5280304013E7D5A9E58CAEE02B01A');
INSERT INTO "bodies" VALUES(3,3,X'28B52FFD245EAD0200E2C4111980B76D9A8A6C072D3AC60EA1D05419688EF59807606FC89A0607C472B619F11E89D8E6A540A3CD15410757E5AFE0CC9636F60CB042BBB9EEC4F16617B29D84923B72991470860300544843ABECDDED7402609BACFC');
INSERT INTO "bodies" VALUES(8,0,X'28B52FFD2469C502001246131790296D9CFA64EF77175FA2499286D9FDCCE4CD5977831029907CD07DEACB1D82734C24B84872C2487599376F538D8B78B3ECF12F36F4302AF315CA7F061729CA8CB841A211A0CC3F837A8C510200EF19450C8A1E7F4BF698');
INSERT INTO "bodies" VALUES(9,0,X'28B52FFD241FF900007B2263686F69636573223A205B7B2274657874223A2022626C7565227D5D7DD2B712D7');
INSERT INTO "bodies" VALUES(9,1,X'28B52FFD245F8D0200B244101690256E68D5CA26562CECC886D2EE7660B9145977831085CC4E468E6E9DBA89CC4E6AC03731C650B6F9784FD234553EB78BE826CE8B2DC055CC016EE46834704204004B8583551A9DC6EF763A011BE6ECC8');
CREATE TABLE epochs (
	epoch INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	started_at FLOAT NOT NULL, 
	pid INTEGER NOT NULL
);
INSERT INTO "epochs" VALUES(1,999.0,4711);
INSERT INTO "epochs" VALUES(2,1500.0,4712);
CREATE TABLE files (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(64) NOT NULL, 
	owner VARCHAR(64), 
	filename TEXT NOT NULL, 
	purpose VARCHAR(32) NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	UNIQUE (id)
);
INSERT INTO "files" VALUES(1,'file-000000000000000000000001','key_000000000001','in.jsonl','batch',120,'0000000000000000000000000000000000000000000000000000000000000000',3000.0,2595000.0);
INSERT INTO "files" VALUES(2,'file-000000000000000000000002',NULL,'grün.pdf','user_data',3,'1111111111111111111111111111111111111111111111111111111111111111',3001.0,NULL);
INSERT INTO "files" VALUES(3,'file-000000000000000000000003',NULL,'batch_00000000000000000000000000000001_output.jsonl','batch_output',50,'2222222222222222222222222222222222222222222222222222222222222222',3023.0,6623.0);
INSERT INTO "files" VALUES(4,'file-000000000000000000000004',NULL,'batch_00000000000000000000000000000001_error.jsonl','batch_output',60,'3333333333333333333333333333333333333333333333333333333333333333',3023.0,6623.0);
CREATE TABLE jobs (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	spec TEXT NOT NULL, 
	pin TEXT NOT NULL, 
	content_hash VARCHAR(64) NOT NULL, 
	num_rows INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	started_at FLOAT, 
	finished_at FLOAT, 
	ends_as VARCHAR(16), 
	reason TEXT, num_completed BIGINT, num_failed BIGINT, num_prompt_tokens BIGINT, num_output_tokens BIGINT, num_cached_tokens BIGINT, results_removed_at FLOAT, finalizing_at FLOAT, cancelling_at FLOAT, 
	UNIQUE (id)
);
INSERT INTO "jobs" VALUES(1,'job_0000000001','completed','completed','{"name": "completed", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/completed.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 3}','0000000000000000000000000000000000000000000000000000000000000001',3,1001.0,NULL,1002.0,1004.0,'completed',NULL,2,1,21,4,10,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'job_0000000002','cancelled','cancelled','{"name": "cancelled", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/cancelled.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 5}','0000000000000000000000000000000000000000000000000000000000000002',5,1002.0,NULL,1002.5,1006.0,'cancelled',NULL,1,0,14,2,5,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(3,'job_0000000003','running','running','{"name": "running", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/running.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 4}','0000000000000000000000000000000000000000000000000000000000000003',4,1003.0,NULL,1007.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(4,'job_0000000004','paused','paused','{"name": "paused", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/paused.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000004',2,1004.0,NULL,NULL,NULL,NULL,'paused by the user',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(5,'job_0000000005','failed','failed','{"name": "failed", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/failed.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000005',2,1005.0,NULL,NULL,1009.0,NULL,'its input is gone',0,0,0,0,0,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'job_0000000006','expired','expired','{"name": "expired", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/expired.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000006',2,1006.0,NULL,NULL,1010.0,'expired',NULL,0,0,0,0,0,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'job_0000000007','validating','validating','{"name": "validating", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/validating.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 7}','0000000000000000000000000000000000000000000000000000000000000007',7,1007.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'job_0000000008','finalizing','finalizing','{"name": "finalizing", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/finalizing.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 1}','0000000000000000000000000000000000000000000000000000000000000008',1,1008.0,NULL,1011.0,NULL,'completed',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(9,'batch_00000000000000000000000000000001','batch','completed','{"name":"batch","model":"default","endpoint":"/v1/chat/completions","input":{"path":["/srv/results/batch_af49e6d82da6e08f7f18786c62c7ea69"],"format":"openai-batch","id":null,"messages":null,"prompt":null,"input":null},"request":{},"output":{"path":"/srv/results/batch_af49e6d82da6e08f7f18786c62c7ea69.jsonl","keep":[],"body":false},"deadline":86400.0,"weight":1.0,"retries":3,"row_timeout":86400.0,"max_failed":null,"source":null,"continue_from":null}','{"files": [{"path": "/srv/files/file-000000000000000000000001", "size_bytes": 120, "mtime_ns": 1, "block_ends": [120], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc',2,3011.0,89411.0,3020.0,3023.0,'completed',NULL,1,1,10,2,5,NULL,3022.0,NULL);
INSERT INTO "jobs" VALUES(10,'batch_00000000000000000000000000000002','batch','failed','{"name":"batch","model":"default","endpoint":"/v1/chat/completions","input":{"path":["/srv/results/batch_aac00e5a934bf3bd0f01bf81417d8ce1"],"format":"openai-batch","id":null,"messages":null,"prompt":null,"input":null},"request":{},"output":{"path":"/srv/results/batch_aac00e5a934bf3bd0f01bf81417d8ce1.jsonl","keep":[],"body":false},"deadline":86400.0,"weight":1.0,"retries":3,"row_timeout":86400.0,"max_failed":null,"source":null,"continue_from":null}','{"files":[],"num_rows":0}','27f2ea2e7292583565e41fafa3469fd63b4420e759bb262c5a9035b91be3b819',0,3012.0,89412.0,NULL,3024.0,NULL,'Cannot find file file-none, or organization batchrun does not have access to it.',0,0,0,0,0,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(11,'batch_00000000000000000000000000000003','batch','validating','{"name":"batch","model":"default","endpoint":"/v1/chat/completions","input":{"path":["/srv/results/batch_776ad02393482b69a8f912e0fd8130ce"],"format":"openai-batch","id":null,"messages":null,"prompt":null,"input":null},"request":{},"output":{"path":"/srv/results/batch_776ad02393482b69a8f912e0fd8130ce.jsonl","keep":[],"body":false},"deadline":86400.0,"weight":1.0,"retries":3,"row_timeout":86400.0,"max_failed":null,"source":null,"continue_from":null}','{"files":[],"num_rows":0}','2c42a9f80d9d1ef61fb96f4c4f167f04166f1307917620972c6d13949e1bc500',0,3013.0,89413.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE results (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	ok INTEGER NOT NULL, 
	attempts INTEGER NOT NULL, 
	finish_reason VARCHAR(32), 
	num_prompt_tokens INTEGER NOT NULL, 
	num_output_tokens INTEGER NOT NULL, 
	num_cached_tokens INTEGER NOT NULL, 
	duration_s FLOAT NOT NULL, 
	committed_at FLOAT NOT NULL, 
	PRIMARY KEY (job_seq, "row")
)
 WITHOUT ROWID

;
INSERT INTO "results" VALUES(1,0,1,1,'stop',10,2,5,0.5,1003.0);
INSERT INTO "results" VALUES(1,1,1,1,'stop',11,2,5,0.5,1003.0);
INSERT INTO "results" VALUES(1,2,0,4,NULL,0,0,0,0.0,1003.0);
INSERT INTO "results" VALUES(2,4,1,1,'stop',14,2,5,0.5,1005.0);
INSERT INTO "results" VALUES(3,0,1,1,'stop',10,2,5,0.5,1008.0);
INSERT INTO "results" VALUES(3,3,0,4,NULL,0,0,0,0.0,1008.0);
INSERT INTO "results" VALUES(8,0,1,1,'stop',10,2,5,0.5,1012.0);
INSERT INTO "results" VALUES(9,0,1,1,'stop',10,2,5,0.0,3021.0);
INSERT INTO "results" VALUES(9,1,0,2,NULL,0,0,0,0.0,3021.0);
CREATE TABLE settings (
	"key" VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "settings" VALUES('offline','false');
CREATE TABLE suspects (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	num_engine_deaths INTEGER NOT NULL, 
	PRIMARY KEY (job_seq, "row")
);
INSERT INTO "suspects" VALUES(3,1,1);
INSERT INTO "suspects" VALUES(3,2,1);
CREATE INDEX ix_jobs_content_hash ON jobs (content_hash);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_files_owner ON files (owner, seq, expires_at, size_bytes);
CREATE INDEX ix_files_purpose ON files (owner, purpose, seq);
CREATE INDEX ix_batches_owner ON batches (owner, job_seq, record_bytes);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('epochs',2);
INSERT INTO "sqlite_sequence" VALUES('jobs',11);
INSERT INTO "sqlite_sequence" VALUES('files',4);
INSERT INTO "sqlite_sequence" VALUES('api_keys',2);
COMMIT;
