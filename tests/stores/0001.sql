BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE attempts (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	num_attempts INTEGER NOT NULL, 
	PRIMARY KEY (job_seq, "row")
);
INSERT INTO "attempts" VALUES(3,1,2);
CREATE TABLE bodies (
	job_seq INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	content BLOB NOT NULL, 
	PRIMARY KEY (job_seq, "row")
);
INSERT INTO "bodies" VALUES(1,1,X'28B52FFD2069CD02001286131790296D136A65EF77175FA2499034D8FFF15C3567DD0D4249909CD07DEACB1D83734C34B848F2290C82CBBC799B6A5CC49B658F7FB1A1875199EF50FE43B808A0CC8B2B241A05CAFC33A8C718050200EF19450C8A1E');
INSERT INTO "bodies" VALUES(1,2,X'28B52FFD205EAD0200E2C4111980B76D9A8A6C072D3AC60EA1D05419688EF59807606FC89A0607C472B619F11E89D8E6A540A3CD15410757E5AFE0CC9636F60CB042BBB9EEC4F16617B29D84923B72991470860300544843ABECDDED7402');
INSERT INTO "bodies" VALUES(1,0,X'28B52FFD206EED02006286141880A96D5C1BA5F9BB88B735DBC628248989D4809A2C8A0B024BB07CD07DEACFA5C1714C2C6C643951510A22900C9BF1E66D2AB2116F9E3DFEC7054D56667CC6F9CF6023C58C134748B40298F10FA11EC82A0200245440312865');
INSERT INTO "bodies" VALUES(2,4,X'28B52FFD2069BD02001206131690296D5397ECFDEEE25B7C4905BF998FCC48CE98F98447708CD07DEAED8E41714C2C98C8F1DE0C5379F336B59888376D8FBFD9D0C386CA67B0FF0E2602A072E2088936012AFF0A6A516C020200EF19450C8A1E');
INSERT INTO "bodies" VALUES(3,0,X'28B52FFD206ABD0200E2C5121780A96D7C9F347F17718B2F8D116142674629982C8A0B0229908CD07DEAC91D8139E648DE1F24B8CC9BB7A9C535BC49F6F8131BF41895F90AE4BF836B14654EDC20D10850E65F4135C5280304013E7D5A9E58CA');
INSERT INTO "bodies" VALUES(3,3,X'28B52FFD205EAD0200E2C4111980B76D9A8A6C072D3AC60EA1D05419688EF59807606FC89A0607C472B619F11E89D8E6A540A3CD15410757E5AFE0CC9636F60CB042BBB9EEC4F16617B29D84923B72991470860300544843ABECDDED7402');
INSERT INTO "bodies" VALUES(8,0,X'28B52FFD2069C502001246131790296D9CFA64EF77175FA2499286D9FDCCE4CD5977831029907CD07DEACB1D82734C24B84872C2487599376F538D8B78B3ECF12F36F4302AF315CA7F061729CA8CB841A211A0CC3F837A8C510200EF19450C8A1E');
CREATE TABLE epochs (
	epoch INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	started_at FLOAT NOT NULL, 
	pid INTEGER NOT NULL
);
INSERT INTO "epochs" VALUES(1,999.0,4711);
INSERT INTO "epochs" VALUES(2,1500.0,4712);
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
	reason TEXT, 
	UNIQUE (id)
);
INSERT INTO "jobs" VALUES(1,'job_0000000001','completed','completed','{"name": "completed", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/completed.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 3}','0000000000000000000000000000000000000000000000000000000000000001',3,1001.0,NULL,1002.0,1004.0,'completed',NULL);
INSERT INTO "jobs" VALUES(2,'job_0000000002','cancelled','cancelled','{"name": "cancelled", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/cancelled.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 5}','0000000000000000000000000000000000000000000000000000000000000002',5,1002.0,NULL,1002.5,1006.0,'cancelled',NULL);
INSERT INTO "jobs" VALUES(3,'job_0000000003','running','running','{"name": "running", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/running.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 4}','0000000000000000000000000000000000000000000000000000000000000003',4,1003.0,NULL,1007.0,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(4,'job_0000000004','paused','paused','{"name": "paused", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/paused.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000004',2,1004.0,NULL,NULL,NULL,NULL,'paused by the user');
INSERT INTO "jobs" VALUES(5,'job_0000000005','failed','failed','{"name": "failed", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/failed.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000005',2,1005.0,NULL,NULL,1009.0,NULL,'its input is gone');
INSERT INTO "jobs" VALUES(6,'job_0000000006','expired','expired','{"name": "expired", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/expired.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 2}','0000000000000000000000000000000000000000000000000000000000000006',2,1006.0,NULL,NULL,1010.0,'expired',NULL);
INSERT INTO "jobs" VALUES(7,'job_0000000007','validating','validating','{"name": "validating", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/validating.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 7}','0000000000000000000000000000000000000000000000000000000000000007',7,1007.0,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'job_0000000008','finalizing','finalizing','{"name": "finalizing", "input": {"path": ["/srv/rows.parquet"]}, "output": {"path": "/srv/finalizing.parquet"}}','{"files": [{"path": "/srv/rows.parquet", "size_bytes": 1, "mtime_ns": 1, "block_ends": [1], "block_hashes": ["00000000000000000000000000000000"]}], "num_rows": 1}','0000000000000000000000000000000000000000000000000000000000000008',1,1008.0,NULL,1011.0,NULL,'completed',NULL);
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
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('epochs',2);
INSERT INTO "sqlite_sequence" VALUES('jobs',8);
COMMIT;
