//! Closed-loop load of one model over HTTP: each connection sends one text, waits for the answer and sends the next.
//!
//! It runs on the cores of the server that it measures, so it does as little as it can: requests are built before the
//! clock starts, an answer is read into one buffer and only its status and size are looked at. A thread per connection
//! blocks in `read`, which costs two system calls a request.
//!
//! `load --address 127.0.0.1:8000 --model NAME --texts FILE --connections N --warmup S --seconds S` prints one line of
//! JSON. FILE holds a text a line. `--start K` begins with text K, `--pids A,B` adds up what CPU these processes used
//! in the measured window, `--answer BYTES` is the size of the output tensor that every answer must have. The window is
//! longer, up to four times, where `--least N` answers have not come by its end: a server that answers 32 requests at
//! once, twice a second, would otherwise be measured in steps.

#![warn(missing_docs)]

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The command line.
#[derive(Default)]
struct Options {
    address: String,
    model: String,
    texts: String,
    connections: usize,
    warmup: Duration,
    seconds: Duration,
    start: usize,
    answer: usize,
    least: usize,
    pids: Vec<u32>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--address" => options.address = value,
                "--model" => options.model = value,
                "--texts" => options.texts = value,
                "--connections" => options.connections = value.parse()?,
                "--warmup" => options.warmup = Duration::try_from_secs_f64(value.parse()?)?,
                "--seconds" => options.seconds = Duration::try_from_secs_f64(value.parse()?)?,
                "--start" => options.start = value.parse()?,
                "--answer" => options.answer = value.parse()?,
                "--least" => options.least = value.parse()?,
                "--pids" => options.pids = value.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?,
                _ => return Err(format!("unknown option {name}").into()),
            }
        }
        if options.address.is_empty() || options.model.is_empty() || options.connections == 0 {
            return Err("--address, --model, --texts and --connections are needed".into());
        }
        Ok(options)
    }
}

/// The whole HTTP request for one text, with the text and the answer as binary data.
fn request(options: &Options, text: &str) -> Vec<u8> {
    let size = text.len() + 4;
    let json = format!(
        concat!(
            r#"{{"inputs":[{{"name":"TEXT","datatype":"BYTES","shape":[1,1],"parameters":{{"binary_data_size":{}}}}}],"#,
            r#""outputs":[{{"name":"EMBEDDING","parameters":{{"binary_data":true}}}}]}}"#
        ),
        size
    );
    let mut out = format!(
        "POST /v2/models/{}/infer HTTP/1.1\r\nHost: {}\r\nContent-Type: application/octet-stream\r\n\
         Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n{json}",
        options.model,
        options.address,
        json.len(),
        json.len() + size,
    )
    .into_bytes();
    // A BYTES element: its length in four bytes, little endian, then the bytes.
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
    out
}

/// A keep-alive connection and the buffer that its answers are read into.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self { stream, buffer: vec![0; 1 << 16] })
    }

    /// Sends `request` and reads the answer, which must be 200 and hold `answer` bytes of tensor (0: any size).
    fn ask(&mut self, request: &[u8], answer: usize) -> Result<()> {
        self.stream.write_all(request)?;
        let mut filled = 0;
        loop {
            if filled == self.buffer.len() {
                self.buffer.resize(filled * 2, 0);
            }
            let count = self.stream.read(&mut self.buffer[filled..])?;
            if count == 0 {
                return Err("the server closed the connection".into());
            }
            filled += count;
            let Some(head) = find(&self.buffer[..filled], b"\r\n\r\n") else { continue };
            let header = std::str::from_utf8(&self.buffer[..head])?;
            let body = field(header, "content-length").ok_or("an answer without Content-Length")?;
            if filled < head + 4 + body {
                continue;
            }
            if !header.starts_with("HTTP/1.1 200") {
                let text = String::from_utf8_lossy(&self.buffer[head + 4..filled]);
                return Err(format!("{}: {text}", header.lines().next().unwrap_or_default()).into());
            }
            let json = field(header, "inference-header-content-length").unwrap_or(body);
            if answer > 0 && body - json != answer {
                return Err(format!("an answer of {} bytes of tensor, not {answer}", body - json).into());
            }
            return Ok(());
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// The number in the header line `name` (lower case).
fn field(header: &str, name: &str) -> Option<usize> {
    header.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim().parse().ok())?
    })
}

/// Clock ticks that `process` used, in user and kernel mode: fields 14 and 15 of `/proc/<process>/stat`.
fn ticks(process: &str) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The second field is a name in parentheses that may hold anything.
    let rest = stat.rsplit_once(')').ok_or("a stat file without a name")?.1;
    let mut fields = rest.split_whitespace().skip(11);
    let mut next = || -> Result<u64> { Ok(fields.next().ok_or("a short stat file")?.parse()?) };
    Ok(next()? + next()?)
}

/// Clock ticks that anything on this machine used: /proc/stat without idle and iowait.
fn machine_ticks() -> Result<u64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().ok_or("an empty /proc/stat")?;
    let fields = line.split_whitespace().skip(1).map(str::parse).collect::<std::result::Result<Vec<u64>, _>>()?;
    // user nice system idle iowait irq softirq steal; guest time is inside user.
    Ok(fields.iter().take(8).enumerate().filter(|(i, _)| !matches!(i, 3 | 4)).map(|(_, ticks)| ticks).sum())
}

/// CPU used so far by the server's processes, by this one and by the whole machine.
struct Cpu {
    server: u64,
    client: u64,
    machine: u64,
}

impl Cpu {
    fn now(pids: &[u32]) -> Result<Self> {
        let mut server = 0;
        for pid in pids {
            server += ticks(&pid.to_string())?;
        }
        Ok(Self { server, client: ticks("self")?, machine: machine_ticks()? })
    }
}

/// When an answer was there, and how long it took.
struct Answer {
    at: Instant,
    took: Duration,
}

fn run(options: &Options) -> Result<String> {
    let texts = fs::read_to_string(&options.texts).map_err(|error| format!("{}: {error}", options.texts))?;
    let requests: Vec<Vec<u8>> = texts.lines().map(|text| request(options, text)).collect();
    if requests.is_empty() {
        return Err("the file of texts is empty".into());
    }
    let connections =
        (0..options.connections).map(|_| Connection::open(&options.address)).collect::<Result<Vec<_>>>()?;
    let (next, stop) = (AtomicUsize::new(options.start), AtomicBool::new(false));
    let answered = AtomicUsize::new(0);

    let one = |mut connection: Connection| -> Result<Vec<Answer>> {
        let mut answers = Vec::with_capacity(1 << 14);
        while !stop.load(Ordering::Relaxed) {
            let text = next.fetch_add(1, Ordering::Relaxed) % requests.len();
            let sent = Instant::now();
            connection.ask(&requests[text], options.answer).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            let at = Instant::now();
            answers.push(Answer { at, took: at - sent });
            answered.fetch_add(1, Ordering::Relaxed);
        }
        Ok(answers)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = connections.into_iter().map(|c| scope.spawn(|| one(c))).collect();
        thread::sleep(options.warmup);
        let (before, begin) = (Cpu::now(&options.pids)?, Instant::now());
        let wanted = answered.load(Ordering::Relaxed) + options.least;
        thread::sleep(options.seconds);
        while answered.load(Ordering::Relaxed) < wanted
            && begin.elapsed() < options.seconds * 4
            && !stop.load(Ordering::Relaxed)
        {
            thread::sleep(Duration::from_millis(20));
        }
        let (after, end) = (Cpu::now(&options.pids)?, Instant::now());
        stop.store(true, Ordering::Relaxed);
        let mut took = Vec::new();
        for thread in threads {
            let answers = thread.join().map_err(|_| "a thread panicked")??;
            took.extend(answers.iter().filter(|a| begin < a.at && a.at <= end).map(|a| a.took));
        }
        Ok(report(&mut took, end - begin, &before, &after))
    })
}

fn report(took: &mut [Duration], elapsed: Duration, before: &Cpu, after: &Cpu) -> String {
    took.sort_unstable();
    let quantile = |q: f64| match took.len() {
        0 => 0.0,
        count => took[((count as f64 * q).ceil() as usize).clamp(1, count) - 1].as_secs_f64() * 1e3,
    };
    format!(
        concat!(
            r#"{{"answers":{},"seconds":{:.6},"p50_ms":{:.4},"p99_ms":{:.4},"#,
            r#""server_ticks":{},"client_ticks":{},"machine_ticks":{}}}"#
        ),
        took.len(),
        elapsed.as_secs_f64(),
        quantile(0.50),
        quantile(0.99),
        after.server - before.server,
        after.client - before.client,
        after.machine - before.machine,
    )
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}
